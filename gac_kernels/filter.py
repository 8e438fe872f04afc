"""The gradient filter: skips the vocabulary columns in which a chunk's gradient is negligible.

After training, most softmax entries are tiny: a few percent of the columns carry the gradient G
[M, V] of a chunk's logits. The kernel that writes a row of G marks the columns in which the row has
a large entry, and the backward GEMMs run on the marked columns only. The entries that are left out
of a row have the same sign, so leaving them out would bias the sum over rows; they are replaced by
the rank-one tail d q^T, where d [M] are their sums and q [V] is the distribution of their mass over
the columns, from at most 256 rows. For the gradient of the weight, whose tiny rows an optimizer
such as Adam scales up, they are replaced by those of a sample of rows. The measurements are in
research/gradient_filter.md.

Notation: N tokens, M rows of a chunk or block, V vocabulary size, H hidden size, K columns kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

SAMPLE = 256  # at most so many rows estimate the distribution and the mass of what is dropped
SAMPLED = 3 / 8  # of the rows, for what is dropped from the gradient of the weight


@dataclass(frozen=True)
class GradientFilter:
    """Settings of the filter of the linear functions. The loss does not depend on them."""

    eps: float = 2**-12
    """A column is kept if one of its entries is larger than eps times the derivative of that
    row's loss in its log-prob, plus that in its entropy; without an entropy bonus, if one of its
    probabilities is larger than eps. 0: exact."""
    weight: bool = False
    """Also filter the gradient of the weight: what is dropped is estimated, without bias, from
    3/8 of the rows, drawn with PyTorch's default generator. False: it is exact."""
    max_columns: float = 0.5
    """A chunk that keeps a larger share of its columns is computed exactly, in (0, 1]."""
    max_dropped: float = 2**-6
    """A chunk that drops a larger share of its absolute gradient, estimated from at most 256 rows,
    is computed exactly, in [0, 1]."""

    def __post_init__(self) -> None:
        for name, low in (("eps", 0), ("max_columns", math.ulp(0)), ("max_dropped", 0)):
            value = getattr(self, name)
            real = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not real or not low <= value <= 1:
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


class RowMarks(NamedTuple):
    """Buffers for what a row kernel notes of the gradient it writes, as stored."""

    eps: float
    hit: (
        torch.Tensor
    )  # bool [V], set at the target, and where an entry is above eps (|a| + |b|) / T
    sums: torch.Tensor  # [2, M], zeros: the sum and the absolute sum of each row
    # a and b are the upstream gradients of the row's log-prob and entropy, T is its temperature


class Kept(NamedTuple):
    """The part of a chunk's gradient that is multiplied, and sums of the rest."""

    columns: torch.Tensor  # int64 [K], ascending
    values: torch.Tensor  # [M, K]
    sums: torch.Tensor  # [M]: d
    mass: torch.Tensor  # [M]: their absolute sums
    distribution: torch.Tensor  # [V]: q


def mark_rows(
    grad: torch.Tensor, targets: torch.Tensor, coefficient: torch.Tensor, marks: RowMarks
) -> None:
    """Fill `marks` from a gradient [..., V]: the reference implementation.

    targets, coefficient: [M]; the coefficient is (|a| + |b|) / T, 0 for rows without a gradient.
    """
    rows = grad.flatten(0, -2).to(marks.sums.dtype)
    marks.hit.logical_or_((rows.abs() > marks.eps * coefficient[:, None]).any(0))
    marks.hit[targets[(targets >= 0) & (targets < len(marks.hit)) & (coefficient != 0)]] = True
    marks.sums.copy_(torch.stack([rows.sum(1), rows.abs().sum(1)]))


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
    """Filters the chunks of one call on `tokens` rows; see `GradientFilter`.

    `total` adds a tensor over the ranks that share the vocabulary; each filters its own columns.
    """

    def __init__(
        self,
        settings: GradientFilter,
        weight: torch.Tensor,
        tokens: int,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.settings, self.total = settings, total or (lambda x: x)
        self.rows, self.kept = 0, 0.0
        self.hit = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        # sum and absolute sum of each row, and the part of the latter that was dropped
        self.sums = weight.new_zeros(
            3, max(tokens, 1), dtype=torch.promote_types(weight.dtype, torch.float32)
        )

    def marks(self, index: torch.Tensor) -> RowMarks | None:
        """The buffers of a row kernel call on the tokens at `index` [M]."""
        if not self.settings.eps:
            return None
        return RowMarks(self.settings.eps, self.hit, self.sums.new_zeros(2, len(index)))

    def store(self, index: torch.Tensor, marks: RowMarks) -> None:
        """Store the sums of the tokens at `index` [M]."""
        self.sums[:2].index_copy_(1, index, marks.sums)

    def select(self, grad: torch.Tensor, index: torch.Tensor) -> Callable[[], Kept | None]:
        """Choose the columns of a chunk's gradient [M, V], with the tokens at `index` [M].

        Returns a function that waits for their number, so that the caller can launch other work
        before. Its result is None if the chunk is to be computed exactly.
        """
        settings, (rows, width) = self.settings, grad.shape
        self.rows += rows
        if not settings.eps or not rows:
            self.kept += rows
            return lambda: None
        # the marked columns in order; all others are written to the last place
        places = torch.where(self.hit, self.hit.cumsum(0) - 1, width)
        columns = places.new_empty(width + 1)
        columns[places] = torch.arange(width, device=grad.device)
        share = self.sums.new_zeros(width)
        for part in grad[:: -(-rows // SAMPLE)].split(SAMPLE // 8):  # a part stays in the cache
            share += part.abs().sum(0, dtype=share.dtype)
        mass, dropped = self.total(
            torch.stack([share.sum(), share.masked_fill_(self.hit, 0).sum()])
        )
        counts = read(torch.stack([self.hit.sum().to(mass.dtype), dropped / mass]))
        share /= share.sum().clamp(min=torch.finfo(share.dtype).tiny)
        self.hit = torch.zeros_like(self.hit)

        def finish() -> Kept | None:
            count, estimate = counts()
            few = count <= settings.max_columns * width
            if not (few and estimate <= settings.max_dropped):  # also if the estimate is nan
                self.kept += rows
                return None
            self.kept += rows * count / width
            chosen = columns[: int(count)]
            values = grad.index_select(1, chosen)
            wide, (total, mass, _) = values.to(self.sums.dtype), self.sums[:, index]
            dropped = (mass - wide.abs().sum(1)).clamp(min=0)
            self.sums[2].index_copy_(0, index, dropped)
            return Kept(chosen, values, total - wide.sum(1), dropped, share)

        return finish

    def report(self) -> torch.Tensor:
        """The fields of `FilterReport`, float32 [2]."""
        counts = self.sums.new_full((2,), len(self.hit))
        counts[0] *= self.kept / max(self.rows, 1)
        kept, columns = self.total(counts)
        mass, dropped = self.total(self.sums[1:])
        return torch.stack([kept / columns, (dropped / mass).nan_to_num().max()]).float()


def read(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy values to the host; the result waits for that copy, not for later work."""
    if values.device.type != "cuda":
        return values.tolist
    host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.current_stream(values.device).record_event()
    return lambda: event.synchronize() or host.tolist()
