"""Batches and helpers for the tests of the native CPU backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gac_kernels import DemoWeight, LossSpec, fused_gac_loss, reference
from gac_kernels.backends import cpu

CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)
if reason := cpu.unavailable(CPU, torch.float32):
    pytest.skip(f"native backend: {reason}", allow_module_level=True)


def batch(
    width: int, rows: int = 4, length: int = 5, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Build rollouts and demonstrations with masked tokens; old and ref are close to the policy."""
    g = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, length, width, generator=g)
    targets = torch.randint(width, (rows, length), generator=g)
    logps, _ = reference.token_logprobs(logits, targets, temperature=temperature)
    noise = torch.randn(2, rows, length, generator=g)
    targets[1, length // 2 :] = -100
    return {
        "logits": logits,
        "targets": targets,
        "advantages": torch.randn(rows, length, generator=g),
        "is_demo": torch.arange(rows) % 2 == 1,
        "old_logps": logps + 0.3 * noise[0],
        "ref_logps": logps + 0.3 * noise[1],
    }


def call(
    data: dict[str, Tensor], logits: Tensor | None = None, backend: str = "native", **keywords
) -> tuple[dict[str, Tensor], Tensor]:
    """Return (outputs, gradient of the logits)."""
    inputs = dict(data)
    logits = inputs.pop("logits") if logits is None else logits
    inputs.pop("logits", None)
    leaf = logits.detach().requires_grad_()
    out = fused_gac_loss(leaf, **inputs, backend=backend, **keywords, mu=0.5)
    out.loss.backward()
    names = ("loss", "rollout_loss", "demo_loss", "kl", "clip_fraction", "logps", "entropy")
    return {name: getattr(out, name).detach() for name in names}, leaf.grad


def error(value: Tensor, truth: Tensor) -> float:
    """Largest absolute error."""
    return (value.double() - truth.double()).abs().max().item()


SPECS = {
    "plain": LossSpec(),
    "everything": LossSpec(
        kl_coef=0.1, entropy_coef=0.02, dual_clip=1.2, temperature=0.7, clip_high=0.28
    ),
    "k1, unclipped, demo weight ONE": LossSpec(
        kl_coef=0.2, kl_estimator="k1", clip_low=None, clip_high=None, demo_weight=DemoWeight.ONE
    ),
    "k2, demo weight P, high temperature": LossSpec(
        kl_coef=0.2, kl_estimator="k2", demo_weight=DemoWeight.P, temperature=2.5
    ),
    "shaped": LossSpec(demo_weight=DemoWeight.SHAPED, entropy_coef=-0.01),
    "trust": LossSpec(demo_weight=DemoWeight.TRUST, demo_shape=0.01),
}
