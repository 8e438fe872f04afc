"""The `loss` section of a configuration reaches the fused loss of a training step."""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gac.errors import ConfigError
from gac.models import head
from gac.models.head import Head
from gac.rows import Batch
from gac.training.token_loss import OtherLogps, custom_loss
from gac.training.trainer import Trainer
from gac.types import TermPair
from gac_kernels import LossSpec, projection
from tests.methods.published import LOSSES, constant_sum
from tests.methods.test_methods_values import assert_close, gradient, one_step_terms
from tests.tiny import metrics, tiny_config

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
    assert specs
    assert all({key: getattr(s, key) for key in wanted} == wanted for s in specs)
    assert any((p != q).any() for p, q in zip(trainer.model.parameters(), before, strict=True))


UNUSED_BY_SDFT = {"clip_low": 0.1, "policy_loss": "reinforce", "demo_reduction": "sum"}
SECTIONS: list[tuple[Any, dict[str, Any], str]] = [  # method, section `loss`, part of the error
    ("grpo", {"demo_reduction": "sum"}, "demo_reduction='sum' has no effect on method 'grpo'"),
    ("sft", {"kl_coef": 0.1}, "kl_coef=0.1 has no effect on method 'sft'"),
    ("sft", {"dual_clip": 2.0}, "on method 'sft'"),
    ("sft", {"rollout_reduction": "sum"}, "on method 'sft'"),
    ("constant", {"use_bias_correction_kl": True}, "without kl_coef"),
    ("dpo", {"clip_low": 0.1}, "on method 'dpo'"),
    ("asft", {"demo_weight": "p"}, "on method 'asft'"),
    ("sdar", {"demo_reduction": "sum"}, "on method 'sdar'"),
    *(("sdft", {key: value}, "on method 'sdft'") for key, value in UNUSED_BY_SDFT.items()),
    ("sdft", {"kl_coef": 0.1, "entropy_coef": 0.01, "rollout_reduction": "token"}, ""),
    ("sdpg", {"kl_coef": 0.1}, "sets it to 0.001; use method.kl_coef instead"),
    *((name, {"clip_low": 0.1}, "") for name in ("sdar", "dypo", "prefix-rft")),
    *(
        (name, {"demo_reduction": "sequence"}, "sets it to 'token'; remove the key")
        for name in ("multitask", "hpt", "relift", "uft", "srft", "dypo")
    ),
    *(
        (name, {"rollout_reduction": "token"}, "sets it to 'sequence'; remove the key")
        for name in ("gspo", "dpo", "ipo", "dypo")
    ),
    ("dapo", {"kl_coef": 0.1}, "sets it to 0.0; remove the key"),
    ("luffy", {"clip_low": 0.1}, "loss.clip_low=0.1: method 'luffy' sets it to None; remove"),
    ("luffy", {"entropy_coef": 0.5}, "sets it to 0.001; use method.entropy_coef instead"),
    ("luffy", {"demo_shape": 0.3}, "sets it to 0.1; use method.shape instead"),
    ("constant", {"demo_weight": "p"}, "sets it to .*; use method.weight instead"),
    ("constant", {"temperature": 0.5}, "loss.temperature=0.5: use rollouts.temperature instead"),
    ("constant", {"policy_loss": "sapo", "clip_high": 0.5}, "without policy_loss=clip or cispo"),
    ("constant", {"policy_loss": "sapo", "dual_clip": 2.0}, "without policy_loss=clip"),
    ("constant", {"sapo_tau": [1.0, 2.0]}, "without policy_loss=sapo"),
    ("constant", {"policy_loss": "sapo", "sapo_tau": [1.0, 2.0]}, ""),
    (
        "constant",
        {"policy_loss": "reinforce", "importance_sampling_level": "sequence"},
        "without a policy_loss with ratios",
    ),
    ("constant", {"kl_estimator": "k1"}, "without kl_coef"),
    ("constant", {"demo_shape": 0.3}, "without demo_weight=shaped or trust"),
    ({"name": "constant", "weight": "trust"}, {"demo_shape": 0.3}, ""),
    ("constant", {"correction_min": 0.5}, "without rollouts.correction"),
    ("constant", {"max_tokens": 9}, "without a constant reduction"),
    ("dr-grpo", {"max_tokens": 9}, ""),
    ("constant", {"clip_high": 0.5, "dual_clip": 2.0, "importance_sampling_level": "sequence"}, ""),
]


@pytest.mark.parametrize(("method", "loss", "error"), SECTIONS)
def test_keys_without_effect_are_refused(method, loss, error, tmp_path):
    with pytest.raises(ConfigError, match=error) if error else contextlib.nullcontext():
        tiny_config(tmp_path, tmp_path, method=method, loss=loss)


REDUCTIONS = {
    **dict.fromkeys(["dpo", "ipo", "dypo"], lambda x, rows: sum(y.mean() for y in x) / len(x)),
    **dict.fromkeys(["srft", "sdar"], lambda x, rows: sum(y.sum() for y in x) / sum(map(len, x))),
    "prefix-rft": lambda x, rows: constant_sum(x, len(rows)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_penalties_are_added_to_custom_losses(name, two_layers, tmp_path):
    keys = {"kl_coef": 0.3, "kl_estimator": "k1", "entropy_coef": 0.2}
    _, terms, grads, model = one_step_terms(name, two_layers, tmp_path, loss=keys)
    penalties = [
        (0.3 * (r.logp - r.ref) - 0.2 * r.entropy)[~r.demo] for r in terms if not r.row.is_demo
    ]
    assert_close(grads, gradient(LOSSES[name](terms) + REDUCTIONS[name](penalties, terms), model))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_corrections_multiply_custom_losses(correction, reused, linear, monkeypatch):
    """Log-ratios to the engine of 0, 0.5 and -1 per token; the last row has no log-probs of it."""
    logits = torch.randn(4, 2, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (4, 2))
    logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    gaps = torch.tensor([[0.0], [0.5], [-1.0], [math.nan]]).expand(4, 2)
    batch = Batch(
        {},
        targets,
        torch.ones(4),
        torch.zeros(4, dtype=torch.bool),
        (0, 2, 4, 6),
        torch.tensor([]),
        None,
    )
    spec = LossSpec(correction=correction, correction_max=2.0, rollout_reduction="token")
    monkeypatch.setitem(projection.CHUNK_BYTES, "cpu", 1)  # a token per block
    head = Head(logits, torch.eye(7).double()) if linear else Head(None, logits=logits)
    out = custom_loss(
        lambda view: view.policy_loss,
        head,
        batch,
        mu=0.0,
        spec=spec,
        norms=TermPair(1.0, 8.0),
        logps=OtherLogps(old=logps.detach() if reused else None, engine=logps.detach() - gaps),
        per_token=True,
    )
    factors = [1.0, math.exp(0.5), math.exp(-1), 1.0]
    if correction == "sequence_mask":
        factors = [1.0, 0.0, math.exp(-2), 1.0]
    truth = -(torch.tensor(factors)[:, None] * logps).sum() / 8
    ours, expected = (
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (out.loss, truth)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["constant", "sdar", "uft"])
def test_the_observed_kl_is_k3_whatever_the_loss_uses(name, task, tmp_path):
    seen = []
    for estimator in ("k3", "k1"):
        loss = {"kl_coef": 1e-9, "kl_estimator": estimator}
        data = {"prompts": str(task / "prompts.jsonl"), "demos": str(task / "demos.jsonl")}
        config = tiny_config(
            task, tmp_path / estimator, method=name, data=data, loss=loss, eval={}, steps=3
        )
        Trainer(config).run()
        seen.append([row["kl"] for row in metrics(tmp_path / estimator)])
    assert seen[0][0] == 0 < seen[0][1]
    assert seen[1] == pytest.approx(seen[0], rel=1e-3)
