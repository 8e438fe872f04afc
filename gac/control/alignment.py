"""Alignment of demonstrations and rewards: the inner product of the two mean gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Alignment(NamedTuple):
    """Unbiased estimates of the gradients' products in a common unit; nan where unknown."""

    inner: float
    """<g_s, g_r>."""
    inner_variance: float
    """Squared standard error of `inner`; an unbiased estimate, so it may be negative."""
    sft_square: float
    """`|g_s|^2` with the noise subtracted; may be negative."""
    rl_square: float
    """`|g_r|^2` with the noise subtracted; may be negative."""
    sft_total: float = math.nan
    """Measured `|g_s|^2`, noise included."""
    rl_total: float = math.nan
    """Measured `|g_r|^2`, noise included."""

    def normalized(self) -> Alignment:
        """The alignment after scaling both measured gradients to norm 1; `inner` is their cosine.

        The cosine is near 0 if the gradients are mostly noise, and 0 if either is zero.
        """
        size = math.sqrt(max(self.sft_total, 0.0)) * math.sqrt(max(self.rl_total, 0.0))
        if size == 0:
            return Alignment(0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
        return Alignment(self.inner / size, self.inner_variance / size / size, 1.0, 1.0, 1.0, 1.0)


def alignment(gram: torch.Tensor, sft_count: int) -> Alignment:
    """Estimate the alignment from inner products of independent micro-batch gradients of each term.

    Args:
        gram: float64 [M_s + M_r, M_s + M_r], micro-batches of equal size, SFT first.
        sft_count: M_s.

    Each estimate is a U-statistic. The mean C of the block C_ij = <x_i, y_j> is unbiased because
    the two terms are independent. The mean of C_ij C_kl over i != k, j != l is an unbiased estimate
    of <g_s, g_r>^2; C^2 minus this mean estimates the variance of C. |g|^2 is the mean of <x_i,
    x_j> over i != j. A term with a single micro-batch has no noise estimate, so values that need
    one are nan.
    """
    cross = gram[:sft_count, sft_count:]
    inner = cross.mean().item()
    return Alignment(
        inner,
        inner**2 - _square_of_mean(cross),
        _off_diagonal(gram[:sft_count, :sft_count]),
        _off_diagonal(gram[sft_count:, sft_count:]),
        gram[:sft_count, :sft_count].mean().item(),
        gram[sft_count:, sft_count:].mean().item(),
    )


def _square_of_mean(cross: torch.Tensor) -> float:
    """Mean of C_ij C_kl over i != k and j != l, by inclusion-exclusion; nan if there are none."""
    rows, columns = cross.shape
    total = cross.sum() ** 2 + cross.square().sum()
    shared = cross.sum(1).square().sum() + cross.sum(0).square().sum()
    return ((total - shared) / (rows * (rows - 1) * columns * (columns - 1))).item()


def _off_diagonal(block: torch.Tensor) -> float:
    """Mean of <x_i, x_j> over i != j; nan if there are none."""
    count = len(block)
    return ((block.sum() - block.diagonal().sum()) / (count * (count - 1))).item()
