"""bfloat16 arithmetic: float32 master weights, and an equal reference."""

from pathlib import Path

import pytest
import torch

from gac.train_config import TrainConfig
from gac.training.trainer import Trainer
from tests import ranks
from tests.tiny import metrics, tiny_config

FSDP = {"mode": "fsdp"}
MODES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 weights": {"dtype": "bfloat16", "master_weights": False},
    "lora": {"dtype": "bfloat16", "lora": {"rank": 2}},
}


def make_config(task: Path, out: Path, mode: str, **changes) -> TrainConfig:
    return tiny_config(
        task,
        out,
        model={"path": str(task / "init"), "random_init": True, **MODES[mode]},
        method="gac",
        **{"loss": {"kl_coef": 0.1}, **changes},
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_kl_of_equal_models_is_0(task: Path, tmp_path: Path, mode: str, packed: bool) -> None:
    trainer = Trainer(
        make_config(
            task,
            tmp_path,
            mode,
            steps=1,
            **({"micro_batch_size": None, "max_tokens_per_micro_batch": 64} if packed else {}),
        )
    )
    trainer.run()
    assert metrics(tmp_path)[0]["kl"] == 0
    expected = torch.bfloat16 if mode == "bfloat16 weights" else torch.float32
    assert {p.dtype for p in trainer.policy.parameters() if p.requires_grad} == {expected}
    assert bool(trainer.policy.__dict__.get("autocast")) == (mode == "bfloat16")
    assert {s["exp_avg"].dtype for s in trainer.optimizer.state.values()} == {expected}


def sample_size_and_kl(config: TrainConfig) -> tuple[int | None, float]:
    trainer = Trainer(config)
    trainer.run()
    return trainer.gradients.kl_sample_size, metrics(Path(config.out))[0]["kl"]


@pytest.mark.parametrize(
    ("parallel", "size", "own"), [({}, None, None), (FSDP, 3, 2)], ids=["ddp", "fsdp, sampled"]
)
def test_the_kl_of_equal_models_is_0_on_two_ranks(
    task: Path, tmp_path: Path, parallel, size, own
) -> None:
    """The ranks share the rollouts of a sampled KL."""
    changes = {
        "steps": 1,
        "parallel": parallel,
        "kl_sample_size": size,
        "loss": {"kl_coef": 0 if size else 0.1},
    }
    assert (
        ranks.run(sample_size_and_kl, make_config(task, tmp_path, "bfloat16", **changes), ranks=2)
        == [(own, 0)] * 2
    )
