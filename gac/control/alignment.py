"""Do demonstrations teach what rewards confirm? The inner product of the two mean gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Alignment(NamedTuple):
    """Unbiased estimates, in one unit; nan where they cannot be told."""

    inner: float
    """<g_s, g_r>."""
    inner_variance: float
    """Squared standard error of `inner`; an unbiased estimate, so it may come out negative."""
    sft_square: float
    """`|g_s|^2` without the part of the noise; may come out negative."""
    rl_square: float
    """`|g_r|^2` without the part of the noise; may come out negative."""
    sft_total: float = math.nan
    """`|g_s|^2` as it was measured, noise included."""
    rl_total: float = math.nan
    """`|g_r|^2` as it was measured, noise included."""

    def normalised(self) -> Alignment:
        """The same of both measured gradients at length one, so that `inner` is their cosine.

        It is near 0 where they are mostly noise, and 0 where one of them is 0.
        """
        size = math.sqrt(max(self.sft_total, 0.0)) * math.sqrt(max(self.rl_total, 0.0))
        if size == 0:
            return Alignment(0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
        return Alignment(self.inner / size, self.inner_variance / size**2, 1.0, 1.0, 1.0, 1.0)


def alignment(gram: Tensor, sft_count: int) -> Alignment:
    """From inner products of independent micro-batch gradients of each side.

    Args:
        gram: float64 [M_s + M_r, M_s + M_r], micro-batches of equal size, SFT first.
        sft_count: M_s.

    Each is a U-statistic. The mean C of the block C_ij = <x_i, y_j> is unbiased because the sides
    are independent, and C^2 minus the mean of C_ij C_kl over i != k, j != l, an unbiased estimate
    of <g_s, g_r>^2, is its variance. |g|^2 is the mean of <x_i, x_j> over i != j. A side of one
    micro-batch has no noise estimate: what needs one is nan.
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


def _square_of_mean(cross: Tensor) -> float:
    """Mean of C_ij C_kl over i != k and j != l, by inclusion and exclusion."""
    rows, columns = cross.shape
    if rows < 2 or columns < 2:
        return math.nan
    total = cross.sum() ** 2 + cross.square().sum()
    shared = cross.sum(1).square().sum() + cross.sum(0).square().sum()
    return ((total - shared) / (rows * (rows - 1) * columns * (columns - 1))).item()


def _off_diagonal(block: Tensor) -> float:
    count = block.shape[0]
    if count < 2:
        return math.nan
    return ((block.sum() - block.diagonal().sum()) / (count * (count - 1))).item()
