"""The `loss` section of a configuration reaches the fused loss of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gac.models import head
from gac.training.trainer import Trainer
from gac_kernels import LossSpec
from tests.tiny import tiny_config

KEYS: dict[str, dict[str, Any]] = {
    "gspo": {"importance_sampling_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {
        "policy_loss": "cispo",
        "clip_low": None,
        "clip_high": 4.0,
        "rollout_reduction": "token",
    },
    "sapo": {
        "policy_loss": "sapo",
        "sapo_tau": [1.0, 1.2],
        "kl_coef": 0.1,
        "use_bias_correction_kl": True,
    },
}


@pytest.mark.parametrize("name", KEYS)
def test_a_step_minimizes_the_configured_loss(
    name: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(task, tmp_path, method={"name": "constant"}, loss=KEYS[name], steps=1)
    assert config.loss == LossSpec(**KEYS[name])
    specs, fused = [], head.fused_linear_gac_loss

    def record(*args: Any, **keywords: Any) -> Any:
        specs.append(keywords["spec"])
        return fused(*args, **keywords)

    monkeypatch.setattr(head, "fused_linear_gac_loss", record)
    trainer = Trainer(config)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer._train_step()
    wanted = {key: getattr(config.loss, key) for key in KEYS[name]}
    assert specs and all({key: getattr(s, key) for key in wanted} == wanted for s in specs)
    assert any((p != q).any() for p, q in zip(trainer.model.parameters(), before, strict=True))
