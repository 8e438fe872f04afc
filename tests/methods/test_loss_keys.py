"""The `loss` section of a configuration reaches the fused loss of a training step."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gac.data.rows import Batch, TermPair
from gac.methods import METHODS
from gac.methods.loss_keys import check_loss
from gac.methods.token_loss import custom_loss
from gac.models import head
from gac.models.head import Head
from gac.training.trainer import Trainer
from gac_kernels import DemoWeight, LossSpec
from tests.methods.published import LOSSES, constant_sum, row_terms
from tests.methods.test_methods_values import assert_close, gradient, one_step
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
    assert specs and all({key: getattr(s, key) for key in wanted} == wanted for s in specs)
    assert any((p != q).any() for p, q in zip(trainer.model.parameters(), before, strict=True))


OTHER: dict[str, Any] = {  # a value of each key that no method sets
    "clip_low": 0.11,
    "clip_high": 0.12,
    "dual_clip": 3.5,
    "kl_coef": 0.13,
    "kl_estimator": "k2",
    "entropy_coef": 0.14,
    "demo_weight": DemoWeight.TRUST,
    "demo_shape": 0.15,
    "rollout_reduction": "sum",
    "demo_reduction": "sum",
    "max_tokens": 9,
    "temperature": 0.7,
    "policy_loss": "sapo",
    "importance_sampling_level": "sequence",
    "sapo_tau": (1.5, 2.5),
    "use_bias_correction_kl": True,
    "correction": "token_mask",
    "correction_min": 0.2,
    "correction_max": 7.0,
}
SETS = {  # keys that the method's publication determines
    "dapo": "clip_low clip_high kl_coef rollout_reduction",
    "gspo": "clip_low clip_high importance_sampling_level rollout_reduction",
    "dr-grpo": "rollout_reduction",
    **dict.fromkeys(["dpo", "ipo"], "rollout_reduction"),
    "luffy": "clip_low clip_high entropy_coef demo_shape rollout_reduction demo_reduction",
    "trapo": "clip_low clip_high demo_weight demo_shape rollout_reduction demo_reduction",
    **dict.fromkeys(["hpt", "relift"], "clip_low clip_high entropy_coef rollout_reduction"),
    "srft": "demo_weight rollout_reduction demo_reduction",
    "prefix-rft": "demo_weight rollout_reduction demo_reduction",
    "sdar": "rollout_reduction",
    "dypo": "rollout_reduction demo_reduction",
}
RL_ONLY = {"grpo", "dr-grpo", "dapo", "gspo", "dpo", "ipo"}
SFT_ONLY = {"sft", "sft-light", "sft-best", "dft", "asft"}


@pytest.mark.parametrize("name", METHODS)
def test_each_key_reaches_the_loss_or_is_refused_by_name(name: str) -> None:
    assert OTHER.keys() == {field.name for field in dataclasses.fields(LossSpec)}
    method = METHODS[name]()
    for key, value in OTHER.items():
        base = LossSpec(**{key: value})
        try:
            check_loss(method, base, 500)
        except ValueError as error:
            assert str(error).startswith(f"loss.{key}={value!r}")
            assert f"method {name!r}" in str(error) or f"use rollouts.{key} instead" in str(error)
            accepted = False
        else:
            assert getattr(method.loss(dataclasses.replace(base, max_tokens=9)).spec, key) == value
            accepted = True
        own = getattr(method.loss(LossSpec(max_tokens=9)).spec, key)
        refused = key in ("temperature", "correction", "correction_max")
        refused |= key in SETS.get(name, "").split() and own != value
        refused |= key.startswith("demo_") and name in RL_ONLY
        refused |= name in SFT_ONLY and not key.startswith(("demo_", "max_"))
        if refused:
            assert not accepted, key
        if name in ("constant", "chord-mu", "gac", "superrl"):
            assert accepted == (not refused and key not in ("demo_weight", "max_tokens")), key
        if name in ("sdar", "dypo", "prefix-rft", "srft", "dpo", "ipo"):
            policy = key.startswith(("clip", "dual", "policy", "importance", "sapo"))
            kl = key in ("kl_coef", "kl_estimator", "entropy_coef", "use_bias_correction_kl")
            used = name in ("sdar", "dypo", "prefix-rft")
            assert accepted == used if policy else accepted or not kl, key


REDUCTIONS = {
    **dict.fromkeys(["dpo", "ipo", "dypo"], lambda x, rows: sum(y.mean() for y in x) / len(x)),
    **dict.fromkeys(["srft", "sdar"], lambda x, rows: sum(y.sum() for y in x) / sum(map(len, x))),
    "prefix-rft": lambda x, rows: constant_sum(x, len(rows)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_penalties_are_added_to_custom_losses(name, task, tmp_path):
    keys = {"kl_coef": 0.3, "kl_estimator": "k1", "entropy_coef": 0.2}
    _, rows, grads, model = one_step(name, task, tmp_path, loss=keys)
    terms = [row_terms(model, model, row) for row in rows]
    penalties = [
        (0.3 * (r.logp - r.ref) - 0.2 * r.entropy)[~r.demo] for r in terms if not r.row.is_demo
    ]
    truth = LOSSES[name](terms) + REDUCTIONS[name](penalties, terms)
    assert_close(grads, gradient(truth, model))


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_corrections_multiply_custom_losses(correction):
    """Log-ratios to the engine of 0, 0.5 and -1 per token; the last row has no log-probs of it."""
    logits = torch.randn(4, 2, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (4, 2))
    logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    gaps = torch.tensor([[0.0], [0.5], [-1.0], [math.nan]]).expand(4, 2)
    batch = Batch(
        targets, targets, torch.ones(4), torch.zeros(4, dtype=torch.bool), (0, 2, 4, 6), 2
    )
    spec = LossSpec(correction=correction, correction_max=2.0, rollout_reduction="token")
    head, norms = Head(None, logits=logits), TermPair(1.0, 8.0)
    out = custom_loss(
        lambda view: view.policy_loss,
        head,
        None,
        batch,
        0.0,
        None,
        None,
        spec,
        norms,
        engine_logps=logps.detach() - gaps,
    )
    factors = [1.0, math.exp(0.5), math.exp(-1), 1.0]
    if correction == "sequence_mask":
        factors = [1.0, 0.0, math.exp(-2), 1.0]
    truth = -(torch.tensor(factors)[:, None] * logps).sum() / 8
    ours, expected = (
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (out.loss, truth)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["constant", "sdar"])
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
    assert seen[0][0] == 0 < seen[0][1] and seen[1] == pytest.approx(seen[0], rel=1e-3)
