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
from typing import NamedTuple

import torch

from . import projection
from .contract import GradientFilter
from .projection import Head, compact
from .tokens import NeedsGrad, Operands, RowMarks, capturing

SAMPLE = 256  # at most so many rows estimate the distribution and the mass of what is dropped
SAMPLED = 3 / 8  # of the rows, for what is dropped from the gradient of the weight


class Kept(NamedTuple):
    """The part of a chunk's gradient that is multiplied, and sums of the rest."""

    columns: torch.Tensor  # int64 [K], ascending
    values: torch.Tensor  # [M, K]
    sums: torch.Tensor  # [M]: d
    mass: torch.Tensor  # [M]: their absolute sums
    distribution: torch.Tensor  # [V]: q


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
        """The fields of `contract.FilterReport`, float32 [2]."""
        counts = self.sums.new_full((2,), len(self.hit))
        counts[0] *= self.kept / max(self.rows, 1)
        kept, columns = self.total(counts)
        mass, dropped = self.total(self.sums[1:])
        return torch.stack([kept / columns, (dropped / mass).nan_to_num().max()]).float()


class FilteredHead(Head):
    """A head whose backward GEMMs use the columns that `ColumnFilter` keeps."""

    def __init__(self, op: Operands, needs: NeedsGrad, settings: GradientFilter) -> None:
        super().__init__(op, needs)
        total = getattr(op.backend, "all_reduce", None)  # of a sharded vocabulary
        self.filter = ColumnFilter(settings, self.projection.weight, len(op.rows), total)

    def marks(self, index: torch.Tensor, span: slice) -> RowMarks | None:
        return self.filter.marks(index[span])

    def store(self, index: torch.Tensor, span: slice, marks: RowMarks) -> None:
        self.filter.store(index[span], marks)

    def report(self) -> torch.Tensor | None:
        return self.filter.report()

    def rescale(self, factor: torch.Tensor, grad: torch.Tensor | None) -> None:
        super().rescale(factor, grad)
        self.filter.sums.mul_(factor)

    def add(
        self, index: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, *, single_chunk: bool
    ) -> None:
        selected, exact = self.filter.select(grad, index), not self.filter.settings.weight
        if self.needs.weight and exact:  # while the host waits for the number of columns
            self.add_weight(rows, grad, single_chunk=single_chunk)
        if self.needs.bias:
            self._d_bias += grad.sum(0, dtype=self.projection.accum_dtype)
        kept = selected()
        if self.needs.rows:
            d_rows = self.projection.hidden_gradient(grad) if kept is None else self._rows(kept)
            self.add_hidden(index, d_rows)
        if self.needs.weight and not exact:
            if kept is None:
                self.add_weight(rows, grad, single_chunk=single_chunk)
            else:
                self._add_sampled(kept, rows, grad)

    def _rows(self, kept: Kept) -> torch.Tensor:
        """The gradient [M, H] of a chunk's rows from the columns kept and the tail."""
        head = self.projection
        shape = len(kept.values), head.weight.shape[1]
        out = torch.empty(shape, dtype=head.accum_dtype, device=head.weight.device)
        projection.multiply(kept.values, head.weight.index_select(0, kept.columns), out)
        tail = out.new_empty(1, shape[1])
        projection.multiply(kept.distribution.to(head.gemm_dtype)[None], head.weight, tail)
        return out.addr_(kept.sums.to(out.dtype), tail[0])

    def _add_sampled(self, kept: Kept, rows: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a chunk to the gradient of the weight; overwrites `grad`.

        The columns kept take part with all rows, the others with a sample of rows.
        """
        factors = sample_factors(kept.mass)
        factors, sampled, grad = compact(factors != 0, factors, rows, grad)
        grad.index_fill_(1, kept.columns, 0)
        sampled = sampled * factors[:, None].to(rows.dtype)
        d_weight = self.add_weight(sampled, grad, single_chunk=False)
        part = d_weight.new_empty(len(kept.columns), rows.shape[1])
        projection.multiply(kept.values.T, rows, part)
        d_weight.index_add_(0, kept.columns, part)


def make_head(op: Operands, needs: NeedsGrad) -> Head:
    """The head of a call, with its filter if it has one."""
    if op.filter is None or capturing(op.rows.device):  # a capture reads no count
        return Head(op, needs)
    return FilteredHead(op, needs, op.filter)


def read(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy values to the host; the result waits for that copy, not for later work."""
    if values.device.type != "cuda":
        return values.tolist
    host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.current_stream(values.device).record_event()
    return lambda: event.synchronize() or host.tolist()
