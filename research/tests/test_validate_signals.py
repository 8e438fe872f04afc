"""The controls of the paper's table 12: the disagreement after shuffling a coefficient."""

import math

import pytest
import torch

from gac_kernels import fused_gac_loss
from research.validate_signals import disagreement

LENGTHS = torch.tensor([3, 1, 5])


def coefficients() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """phi, advantages and shares of nine tokens in three rollouts, and the kernel's statistic."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(int(LENGTHS.sum()), 7, generator=g, dtype=torch.float64)
    targets = torch.randint(0, 7, (len(logits),), generator=g)
    advantages = torch.randn(3, generator=g, dtype=torch.float64)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0)])
    out = fused_gac_loss(
        logits,
        targets,
        advantages,
        cu_seqlens=starts.int(),
        backend="reference",
    )
    assert out.moments is not None
    p = out.logps.exp()
    shares = (1 / LENGTHS.double()).repeat_interleave(LENGTHS)
    tokens = advantages.repeat_interleave(LENGTHS)
    return p * (1 - p), tokens, shares, out.moments.signals().disagreement


def test_without_shuffling_it_is_the_kernels_statistic() -> None:
    phi, advantages, shares, expected = coefficients()
    assert disagreement(phi, advantages, shares) == pytest.approx(expected, rel=1e-9)


def test_shuffling_changes_it() -> None:
    phi, advantages, shares, expected = coefficients()
    assert abs(disagreement(phi.flip(0), advantages, shares) - expected) > 1e-3


def test_a_constant_coefficient_has_none() -> None:
    """The last row of table 12: the paper's z-scores of constants are undefined."""
    phi, advantages, shares, _ = coefficients()
    assert math.isnan(disagreement(phi, torch.zeros_like(advantages), shares))
