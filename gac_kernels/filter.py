"""The gradient filter: skips the vocabulary columns in which a chunk's gradient is negligible.

After training, most softmax entries are tiny: a few percent of the columns carry the gradient G
[M, V] of a chunk's logits. The backward GEMMs run on these columns only. The entries that are left
out of a row have the same sign, so leaving them out would bias the sum over rows; they are replaced
by the rank-one tail d q^T, where d [M] are their sums and q [V] is the distribution of their mass
over the columns. For the gradient of the weight, whose tiny rows an optimizer such as Adam scales
up, they are replaced by those of a sample of rows. docs/gradient_filter.md has measurements.

Notation: M rows of a chunk, V vocabulary size, H hidden size, K columns kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

SAMPLE = 32  # rows that find most exact chunks early; also rows per step of `column_sums`
SAMPLED = 3 / 8  # of the rows, for what is dropped from the gradient of the weight


@dataclass(frozen=True)
class GradientFilter:
    """Settings of the filter of the linear functions. The loss does not depend on them."""

    eps: float = 2**-12
    """A column is kept if one of its entries is larger than eps times the root mean square, over
    the chunk's rows, of the entry at the target. 0: exact."""
    weight: bool = False
    """Also filter the gradient of the weight: what is dropped is estimated, without bias, from
    3/8 of the rows, drawn with PyTorch's default generator. False: it is exact."""
    max_columns: float = 0.5
    """A chunk that keeps a larger share of its columns is computed exactly, in (0, 1]."""
    max_dropped: float = 2**-6
    """A chunk that drops a larger share of its absolute gradient is computed exactly, in [0, 1]."""

    def __post_init__(self) -> None:
        for name, low in (("eps", 0), ("max_columns", math.ulp(0)), ("max_dropped", 0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not low <= value <= 1:
                interval = "(0, 1]" if low else "[0, 1]"
                raise ValueError(f"GradientFilter {name}={value!r}: use a number in {interval}")
        if not isinstance(self.weight, bool):
            raise TypeError(f"GradientFilter weight={self.weight!r}: use True or False")


class FilterReport(NamedTuple):
    """What the filter did in one call; 0-d float32 tensors on the device of the rows."""

    kept_columns: torch.Tensor
    """Mean over the rows with a gradient of the share of columns kept; 1 for exact chunks."""
    dropped_mass: torch.Tensor
    """Largest share of a row's absolute gradient that the tail replaced; 0 for exact chunks."""


class Kept(NamedTuple):
    """The part of a chunk's gradient that is multiplied, and sums of the rest."""

    columns: torch.Tensor  # int64 [K], ascending
    values: torch.Tensor  # [M, K]
    sums: torch.Tensor  # [M]: d
    mass: torch.Tensor  # [M]: their absolute sums
    distribution: torch.Tensor  # [V]: q


def column_sums(
    grad: torch.Tensor, threshold: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The columns of grad [M, V] with an entry above `threshold` (0-d), and sums.

    Returns (hit: bool [V], the absolute sum of each column [V], the sum and the absolute sum of
    each row [2, M]); sums are in float32 or better.
    """
    dtype = torch.promote_types(grad.dtype, torch.float32)
    hit = torch.zeros(grad.shape[1], dtype=torch.bool, device=grad.device)
    sums = torch.empty(2, len(grad), dtype=dtype, device=grad.device)
    columns = torch.zeros(grad.shape[1], dtype=dtype, device=grad.device)
    for i in range(0, len(grad), SAMPLE):
        rows = slice(i, i + SAMPLE)
        size = grad[rows].abs()
        hit |= (size > threshold).any(0)
        columns += size.sum(0, dtype=dtype)
        sums[:, rows] = torch.stack([x.sum(1, dtype=dtype) for x in (grad[rows], size)])
    return hit, columns, sums


def sample_factors(mass: torch.Tensor) -> torch.Tensor:
    """Sample `SAMPLED` of the rows by their `mass` [M]: 1 / probability of a row, 0 if not drawn.

    Rows with so much mass that their probability would be above 1 are certain; the others are drawn
    by systematic sampling.
    """
    mass, order = mass.double().sort(descending=True)
    left = math.ceil(SAMPLED * len(mass)) - torch.arange(len(mass), device=mass.device)
    certain = (mass * left >= mass.sum() + mass - mass.cumsum(0)) & (mass > 0)
    others = mass.masked_fill(certain, 0)
    share = others / others.sum().clamp(min=torch.finfo(mass.dtype).tiny)
    probability = torch.where(certain, 1.0, share * (left[0] - certain.sum()))
    end = probability.cumsum(0) + torch.rand((), dtype=mass.dtype, device=mass.device)
    drawn = end.floor() > (end - probability).floor()
    return torch.empty_like(mass).index_copy_(0, order, torch.where(drawn, 1 / probability, 0))


class ColumnFilter:
    """Filters the chunks of one call; see `GradientFilter`."""

    def __init__(self, settings: GradientFilter, weight: torch.Tensor, backend: Any) -> None:
        self.settings, self.weight = settings, weight
        self.sums = getattr(backend, "column_sums", column_sums)
        self.rows, self.kept = 0, 0.0
        self.dropped = torch.zeros((), device=weight.device)

    def select(self, grad: torch.Tensor, targets: torch.Tensor) -> Kept | None:
        """Choose the columns of a chunk's gradient [M, V]; None: compute the chunk exactly."""
        rows, width = grad.shape
        self.rows += rows
        kept = self._select(grad, targets) if rows and self.settings.eps else None
        self.kept += rows * (1.0 if kept is None else len(kept.columns) / width)
        return kept

    def _select(self, grad: torch.Tensor, targets: torch.Tensor) -> Kept | None:
        settings, most = self.settings, self.settings.max_columns * grad.shape[1]
        at_target = grad.gather(1, targets[:, None])
        at_target = at_target.to(torch.promote_types(grad.dtype, torch.float32))
        threshold = settings.eps * at_target.square().mean().sqrt()
        sample = grad[:: -(-len(grad) // SAMPLE)].abs()
        if (sample > threshold).any(0).sum() > most:  # most exact chunks are found early
            return None
        hit, share, (total, mass) = self.sums(grad, threshold)
        hit[targets] = True
        columns = hit.nonzero().squeeze(1)  # on a GPU, the host waits for the chunk's row kernels
        if len(columns) > most:
            return None
        values = grad.index_select(1, columns)
        wide = values.to(total.dtype)
        dropped = (mass - wide.abs().sum(1)).clamp(min=0)
        if dropped.sum() > settings.max_dropped * mass.sum():
            return None
        self.dropped = torch.maximum(self.dropped, (dropped / mass).nan_to_num().max().float())
        share[columns] = 0
        share /= share.sum().clamp(min=torch.finfo(share.dtype).tiny)
        return Kept(columns, values, total - wide.sum(1), dropped, share)

    def report(self) -> torch.Tensor:
        """The fields of `FilterReport`, float32 [2]."""
        share = torch.full_like(self.dropped, self.kept / max(self.rows, 1))
        return torch.stack([share, self.dropped])
