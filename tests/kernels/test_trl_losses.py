"""The loss options against TRL's own `GRPOTrainer._compute_loss`, in float64."""

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gac_kernels import LossSpec, fused_gac_loss, reference

trl = pytest.importorskip("trl", minversion="1.16")
from trl import GRPOTrainer  # noqa: E402 - after the skip

B, T, V, LONGEST = 4, 6, 11, 9
EPSILON = {"clip_low": 0.1, "clip_high": 0.15}
CISPO_BOUND = 1.1  # TRL's epsilon_high is the bound itself for "cispo"
SAPO_TAU = (1.0, 1.0625)  # exact in float32, to which TRL rounds them
# TRL's name: our options
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {**EPSILON, "rollout_reduction": "sequence"},
    "bnpo": {**EPSILON, "rollout_reduction": "token"},
    "dapo": {**EPSILON, "rollout_reduction": "token"},
    "dr_grpo": {**EPSILON, "rollout_reduction": "constant", "max_tokens": LONGEST},
    "luspo": {**EPSILON, "rollout_reduction": "sum"},
    "cispo": {
        "policy_loss": "cispo",
        "clip_low": None,
        "clip_high": CISPO_BOUND - 1,
        "rollout_reduction": "token",
    },
    "sapo": {"policy_loss": "sapo", "rollout_reduction": "sequence", "sapo_tau": SAPO_TAU},
    "vespo": {"policy_loss": "reinforce", "rollout_reduction": "token"},
}
ITEMS = 31.0  # tokens of the accumulation window, which divide "dapo", "cispo" and "vespo"
BY_WINDOW = ("dapo", "cispo", "vespo")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "on-policy": {"old": False},
    "delta": {"delta": 1.3},
    "kl": {"beta": 0.2},
    "unbiased kl": {"beta": 0.2, "use_bias_correction_kl": True},
    "unbiased kl on-policy": {"beta": 0.2, "use_bias_correction_kl": True, "old": False},
    "entropy bonus": {"entropy_coef": 0.1},
    "top entropies": {"quantile": 0.4, "beta": 0.2},
    "off-policy mask": {"threshold": 0.02},
    "token_truncate": {"correction": "token_truncate"},
    "token_mask": {"correction": "token_mask", "beta": 0.2},
    "sequence_truncate": {"correction": "sequence_truncate"},
    "sequence_mask": {"correction": "sequence_mask", "correction_min": 0.6},
}


def make_trainer(name: str, level: str, options: dict[str, Any]) -> GRPOTrainer:
    """A trainer with only the attributes that its loss reads; `logits` stand for the model."""
    trainer = object.__new__(GRPOTrainer)
    same = lambda x, **_: x  # noqa: E731 - one line
    trainer.__dict__.update(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(
            num_processes=1, gather=same, reduce=same, pad_across_processes=same
        ),
        args=SimpleNamespace(
            delta=options.get("delta"),
            use_bias_correction_kl=options.get("use_bias_correction_kl", False),
            sapo_temperature_pos=SAPO_TAU[0],
            sapo_temperature_neg=SAPO_TAU[1],
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        loss_type=name,
        importance_sampling_level=level,
        beta=options.get("beta", 0.0),
        epsilon_low=EPSILON["clip_low"],
        epsilon_high=CISPO_BOUND if name == "cispo" else EPSILON["clip_high"],
        top_entropy_quantile=options.get("quantile", 1.0),
        off_policy_mask_threshold=options.get("threshold"),
        use_vllm="correction" in options,
        vllm_importance_sampling_correction="correction" in options,
        max_completion_length=LONGEST,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=options.get("entropy_coef", 0.0),
        _entropy_bonus_enabled="entropy_coef" in options,
        _metrics={"eval": defaultdict(list)},
    )
    return trainer


def make_batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(B, T, V, generator=g, dtype=torch.float64)
    tokens = torch.randint(V, (B, T), generator=g)
    mask = (torch.arange(T) < torch.tensor([6, 3, 1, 5])[:, None]).long()
    mask[0, 2] = 0  # a tool's token
    logps, _ = reference.token_logprobs(logits, tokens)
    noise = 0.2 * torch.randn(3, B, T, generator=g, dtype=torch.float64)
    engine = logps + 2 * noise[2]
    engine[3, 1] = torch.nan  # the engine could not score it
    return {
        "logits": logits,
        "tokens": tokens,
        "mask": mask,
        "advantages": torch.tensor([1.0, -0.7, 0.4, -1.2], dtype=torch.float64),
        "old": logps + noise[0],
        "ref": logps + noise[1],
        "engine": engine,
    }


def engine_ratio(batch: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """TRL's importance ratio; TRL computes it while it generates, outside of its loss."""
    difference = ((batch["old"] - batch["engine"]) * batch["mask"]).nan_to_num(nan=0.0)
    mode = options["correction"]
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio, low, high = difference.exp(), options.get("correction_min"), 1.2
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < (low or -1)) | (ratio > high), 0.0)


def trl_loss(
    trainer: GRPOTrainer, batch: dict[str, Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    logits = batch["logits"].clone().requires_grad_()
    logps, entropies = reference.token_logprobs(logits, batch["tokens"])
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, entropies.detach(), None)
    if "entropy_coef" in options:
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, entropies, None)
    inputs = {
        "prompt_ids": batch["tokens"][:, :0],
        "prompt_mask": batch["mask"][:, :0],
        "completion_ids": batch["tokens"],
        "completion_mask": batch["mask"],
        "advantages": batch["advantages"],
        "ref_per_token_logps": batch["ref"],
        "num_items_in_batch": torch.tensor(ITEMS),
    }
    if options.get("old", True):
        inputs["old_per_token_logps"] = batch["old"]
    if "correction" in options:
        inputs["importance_sampling_ratio"] = engine_ratio(batch, options)
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def our_weights(
    trainer: GRPOTrainer, name: str, batch: dict[str, Tensor], options: dict[str, Any]
) -> Tensor:
    """The factors that TRL computes from the current log-probs and entropies."""
    logps, entropies = reference.token_logprobs(batch["logits"], batch["tokens"])
    old = batch["old"] if options.get("old", True) else logps
    advantages, mask = batch["advantages"][:, None], batch["mask"]
    weights = torch.ones_like(logps)
    if "quantile" in options:
        weights = weights * trainer.get_high_entropy_mask(entropies, mask, 1 - options["quantile"])
    if "threshold" in options:
        threshold = options["threshold"]
        weights = weights * trainer.get_off_policy_mask(advantages, logps, old, mask, threshold)
    if name == "vespo":
        ratio = engine_ratio(batch, options) if "correction" in options else None
        weights = weights * trainer.get_gamma_weights(advantages, logps - old, mask, ratio)
    return weights


def our_loss(
    trainer: GRPOTrainer, name: str, level: str, batch: dict[str, Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    logits = batch["logits"].clone().requires_grad_()
    # TRL's vespo includes the correction in its own weights
    correction = "none" if name == "vespo" else options.get("correction", "none")
    spec = LossSpec(
        **LOSSES[name],
        importance_sampling_level=level,
        dual_clip=options.get("delta"),
        kl_coef=options.get("beta", 0.0),
        use_bias_correction_kl=options.get("use_bias_correction_kl", False),
        correction=correction,
        correction_min=options.get("correction_min"),
        correction_max=1.2,
    )
    targets = batch["tokens"].masked_fill(batch["mask"] == 0, -100)
    out = fused_gac_loss(
        logits,
        targets,
        batch["advantages"],
        torch.zeros(B).bool(),
        mu=0.0,
        old_logps=batch["old"] if options.get("old", True) else None,
        ref_logps=batch["ref"],
        rollout_logps=None if correction == "none" else batch["engine"],
        weights=our_weights(trainer, name, batch, options),
        rollout_norm=ITEMS if name in BY_WINDOW else None,
        spec=spec,
    )
    loss = out.loss
    if "entropy_coef" in options:  # TRL's bonus is a mean over tokens, whatever the loss type
        _, entropies = reference.token_logprobs(logits, targets)
        loss = loss - options["entropy_coef"] * entropies.sum() / batch["mask"].sum()
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(("name", "level"), itertools.product(LOSSES, ("token", "sequence")))
def test_value_and_gradient(name: str, level: str) -> None:
    batch = make_batch()
    for variant, options in VARIANTS.items():
        if name == "vespo" and options.get("correction", "token").startswith("sequence"):
            continue  # TRL refuses it
        if name in ("cispo", "sapo") and "delta" in options:
            continue  # TRL ignores delta there, and so do we
        trainer = make_trainer(name, level, options)
        expected, expected_grad = trl_loss(trainer, batch, options)
        loss, grad = our_loss(trainer, name, level, batch, options)
        assert expected_grad.abs().max() > 1e-3, variant
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12, msg=variant)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-8, atol=1e-12, msg=variant)
