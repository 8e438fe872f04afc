"""The chunked LM head: its rows block by block, and the gradients of its operands.

Tokens are processed in chunks of blocks (see `projection`): one GEMM for the logits of each block,
the backend's row function and, for rows with a gradient, the two backward GEMMs of the chunk. Rows
without a loss enter no GEMM.
Notation: N tokens, V vocabulary size, H hidden size, M rows of a chunk or block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import projection
from .contract import IGNORE
from .filter import ColumnFilter, Kept, RowMarks, sample_factors
from .projection import Projection, spans
from .tokens import NeedsGrad, Operands, part

# device types on which reading a count makes the host wait for the device
ASYNCHRONOUS = {"cuda"}


# Gradients of the rows, in their dtype, and of the weight [V, H] and the bias [V], in float32 or
# better (that of the weight in its own dtype if one GEMM computed it); None if not needed.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Block(NamedTuple):
    """Consecutive rows of a pass."""

    tokens: slice  # of the order of the pass
    logits: Tensor  # [1, M, V]; the next block overwrites them
    out: Tensor | None = None  # [1, M, V]: where their gradient is written
    marks: RowMarks | None = None  # where the filter's notes of their gradient are written
    before: Tensor | None = None  # the gradient of the rows before it in its chunk


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured; counts cannot be read then, so no row is skipped."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Numbers of rows with a gradient and of rows with a loss, on the device until they are read.
Counts = Tensor | tuple[int, int]


def sort_tokens(live: Tensor, has_gradient: Tensor | None) -> tuple[Tensor, Counts]:
    """Order the tokens [rows with a gradient | forward-only rows | rows without a loss].

    has_gradient: bool [N]; None: no row has one. Returns (order [N], counts).
    """
    if capturing(live.device):
        tokens = len(live)
        return torch.arange(tokens, device=live.device), (
            tokens * (has_gradient is not None),
            tokens,
        )
    has_gradient = torch.zeros_like(live) if has_gradient is None else has_gradient
    group = 2 - live.to(torch.int8) - has_gradient.to(torch.int8)
    return group.argsort(stable=True), torch.stack([has_gradient.sum(), live.sum()])


def read_counts(counts: Counts) -> tuple[int, int]:
    """The counts as numbers.

    The host waits for the device here: launch as much as possible before it, or the device idles
    afterwards.
    """
    gradient_rows, live_rows = counts.tolist() if isinstance(counts, Tensor) else counts
    return gradient_rows, live_rows


class Head:
    """The head of one call: the logits of its rows, and the gradients of its operands."""

    def __init__(self, op: Operands, needs: NeedsGrad, live: Tensor) -> None:
        assert op.weight is not None
        self.hidden, self.needs, self.live = op.rows, needs, live
        sizes = op.chunk_bytes, op.vocab_size
        self.projection = Projection(op.weight, op.bias, op.dtype, *sizes)
        shape = op.rows.shape if needs.rows else (0,)
        self._d_hidden = torch.zeros(shape, dtype=op.rows.dtype, device=op.rows.device)
        self._d_weight: Tensor | None = None  # allocated by the first chunk
        width = len(op.weight) if needs.bias else 0
        self._d_bias = self.projection.weight.new_zeros(width, dtype=self.projection.accum_dtype)
        self.filter = None
        if op.filter is not None and not capturing(op.rows.device):  # a capture reads no count
            self.filter = ColumnFilter(
                op.filter,
                self.projection.weight,
                len(op.rows),
                getattr(op.backend, "all_reduce", None),  # of a sharded vocabulary
            )

    def zeros(self, columns: int) -> Tensor:
        """A buffer for results of the rows, [columns, N]."""
        return self.hidden.new_zeros(columns, len(self.hidden), dtype=self.projection.accum_dtype)

    def _gather(self, index: Tensor) -> Tensor:
        """Gather rows of hidden as a GEMM operand [M, H]."""
        rows = self.projection.operand(self.hidden.index_select(0, index))
        if capturing(index.device):
            # includes rows without a loss: a nan would add 0 * nan to the weight's gradient
            rows = rows.masked_fill(~self.live[index, None], 0)
        return rows

    def blocks(
        self, order: Tensor, counts: Counts, nonzero: Tensor | None = None
    ) -> Iterator[Block]:
        """Yield the tokens with a loss; the caller writes the gradient of those that have one.

        A block's buffers are reused by the next one. `nonzero` [N], in the same order and filled by
        the caller, tells which rows have a gradient; the backward GEMMs skip the others.
        """
        head, (gradient_rows, stop) = self.projection, read_counts(counts)
        chunk_rows = head.chunk_rows(gradient_rows, self.needs.weight)
        chunks = [*spans(0, gradient_rows, chunk_rows)]
        rest = [*spans(gradient_rows, stop, head.block)]
        head.reserve(max((x.stop - x.start for x in chunks[:1] + rest[:1]), default=0))
        for chunk in chunks:
            index = order[chunk]
            rows, grad = self._gather(index), head.gradient(len(index))
            for span in spans(0, len(index), head.block):
                logits = head.logits(rows[span], grad[span])
                tokens = slice(chunk.start + span.start, chunk.start + span.stop)
                marks = None if self.filter is None else self.filter.marks(index[span])
                yield Block(tokens, logits[None], grad[span][None], marks, grad[: span.start])
                if self.filter is not None and marks is not None:
                    self.filter.store(index[span], marks)
            # the gradient of the chunk's logits is complete, and its backward GEMMs follow
            if nonzero is not None and not capturing(index.device):
                index, rows, grad = compact(nonzero[chunk], index, rows, grad)
            self._add(index, rows, grad, single_chunk=gradient_rows <= chunk_rows)
        for tokens in rest:
            yield Block(tokens, head.logits(self._gather(order[tokens]))[None])

    def add_gradients(self, op: Operands, columns: Tensor, order: Tensor, counts: Counts) -> None:
        """Add the gradients of the first tokens of `order`, given those of their outputs.

        columns: [4, N]: lse, entropy, and the upstream gradients of logps and entropy.
        """
        targets, scaling = op.targets[order], op.scaling(order)
        columns = columns.index_select(1, order)
        for block in self.blocks(order, counts):
            rows = targets[block.tokens], *columns[:, block.tokens], part(scaling, block.tokens)
            options = block.out, op.softcap
            op.backend.row_grads(block.logits, *rows, *options, marks=block.marks)

    def rescale(self, factor: Tensor, grad: Tensor | None) -> None:
        """Multiply all gradients so far, with that of a chunk's first logits, by a factor."""
        sums = None if self.filter is None else self.filter.sums
        for x in (self._d_hidden, self._d_weight, self._d_bias, grad, sums):
            if x is not None:
                x.mul_(factor)

    def _add(self, index: Tensor, rows: Tensor, grad: Tensor, single_chunk: bool) -> None:
        """Add a chunk: token indices [M], input rows [M, H] and the logits' gradient [M, V]."""
        head = self.projection
        selected = None if self.filter is None else self.filter.select(grad, index)
        exact = self.filter is None or not self.filter.settings.weight
        if self.needs.weight and exact:  # while the host waits for the number of columns
            self._add_weight(rows, grad, single_chunk)
        if self.needs.bias:
            self._d_bias += grad.sum(0, dtype=head.accum_dtype)
        kept = None if selected is None else selected()
        if self.needs.rows:
            d_rows = head.hidden_gradient(grad) if kept is None else self._filtered_rows(kept)
            self._d_hidden.index_copy_(0, index, d_rows.to(self._d_hidden.dtype))
        if self.needs.weight and not exact:
            if kept is None:
                self._add_weight(rows, grad, single_chunk)
            else:
                self._add_filtered(kept, rows, grad)

    def _add_weight(self, rows: Tensor, grad: Tensor, single_chunk: bool) -> Tensor:
        """Add rows [M, H] with the logits' gradient [M, V] to the gradient of the weight."""
        first = self._d_weight is None
        if self._d_weight is None:
            self._d_weight = self._allocate(single_chunk)
        projection.multiply(grad.T, rows, self._d_weight, accumulate=not first)
        return self._d_weight

    def _filtered_rows(self, kept: Kept) -> Tensor:
        """The gradient [M, H] of a chunk's rows from the columns kept and the tail."""
        head = self.projection
        shape = len(kept.values), head.weight.shape[1]
        out = torch.empty(shape, dtype=head.accum_dtype, device=head.weight.device)
        projection.multiply(kept.values, head.weight.index_select(0, kept.columns), out)
        tail = out.new_empty(1, shape[1])
        projection.multiply(kept.distribution.to(head.gemm_dtype)[None], head.weight, tail)
        return out.addr_(kept.sums.to(out.dtype), tail[0])

    def _add_filtered(self, kept: Kept, rows: Tensor, grad: Tensor) -> None:
        """Add a chunk to the gradient of the weight; overwrites `grad`.

        The columns kept take part with all rows, the others with a sample of rows.
        """
        factors = sample_factors(kept.mass)
        factors, sampled, grad = compact(factors != 0, factors, rows, grad)
        grad.index_fill_(1, kept.columns, 0)
        sampled = sampled * factors[:, None].to(rows.dtype)
        d_weight = self._add_weight(sampled, grad, single_chunk=False)
        part = d_weight.new_empty(len(kept.columns), rows.shape[1])
        projection.multiply(kept.values.T, rows, part)
        d_weight.index_add_(0, kept.columns, part)

    def _allocate(self, single_chunk: bool) -> Tensor:
        """Allocate the weight's gradient [V, H]; float32 or better unless one GEMM rounds it."""
        head = self.projection
        rounded = single_chunk and head.writes_rounded(head.weight.numel())
        dtype = head.weight_dtype if rounded else head.accum_dtype
        return projection.empty_gradient(head.weight.shape, dtype, head.weight.device)

    def gradients(self) -> Gradients:
        """Free the buffers and return the gradients of hidden, weight and bias."""
        self.projection.release()  # first: rounding the sums needs memory too
        if self.needs.weight and self._d_weight is None:
            self._d_weight = self._allocate(single_chunk=False).zero_()
        d_hidden = self._d_hidden if self.needs.rows else None
        return d_hidden, self._d_weight, self._d_bias if self.needs.bias else None

    def report(self) -> Tensor | None:
        """The fields of `filter.FilterReport`, if there is a filter."""
        return None if self.filter is None else self.filter.report()


def compact(
    nonzero: Tensor, index: Tensor, rows: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the rows of a chunk that have a gradient, moving as few rows of `grad` as possible.

    Reads their number: the host waits for the chunk's row kernels, but not for its backward GEMMs.
    """
    count = int(nonzero.sum())
    if count == len(index):
        return index, rows, grad
    # the last rows with a gradient fill the gaps among the first `count` rows
    kept = (~nonzero).to(torch.int8).argsort(stable=True)[:count]
    gaps = (~nonzero[:count]).nonzero().squeeze(1)
    sources = kept[count - len(gaps) :]
    for i in range(0, len(gaps), step := max(len(grad) // 16, 1)):
        grad.index_copy_(0, gaps[i : i + step], grad.index_select(0, sources[i : i + step]))
    kept = torch.arange(count, device=index.device).index_copy_(0, gaps, sources)
    return index[kept], rows[kept], grad[:count]


def row_stats(op: Operands, more_outputs: bool = False) -> Sequence[Tensor]:
    """Compute logps, entropy and lse, and MORE_OUTPUTS if `more_outputs`: [N]; 2 N H V FLOPs."""
    if op.weight is None:
        return op.backend.row_stats(op.rows, op.targets, op.scaling(), op.softcap, more_outputs)
    head = Head(op, NeedsGrad(False, False, False), op.targets != IGNORE)
    return head_stats(op, head, None, more_outputs)[0].unbind()


def head_stats(
    op: Operands, head: Head, has_gradient: Tensor | None, more_outputs: bool = False
) -> tuple[Tensor, Tensor, Counts]:
    """Compute `row_stats`, and the order and the counts of the rows with a gradient."""
    order, counts = sort_tokens(head.live, has_gradient)
    targets, scaling = op.targets[order], op.scaling(order)
    results = head.zeros(6 if more_outputs else 3)
    gradient_rows, live_rows = read_counts(counts)
    for block in head.blocks(order, (0, live_rows)):
        arguments = targets[block.tokens], part(scaling, block.tokens), op.softcap, more_outputs
        torch.stack(op.backend.row_stats(block.logits, *arguments), out=results[:, block.tokens])
    return unsorted(results, order), order, (gradient_rows, gradient_rows)


def unsorted(results: Tensor, order: Tensor) -> Tensor:
    """Move results [X, N] in the order of a pass to their tokens."""
    return torch.empty_like(results).index_copy_(1, order, results)


def row_grads(op: Operands, columns: Sequence[Tensor], needs: NeedsGrad) -> Gradients:
    """Compute the gradients of the operands from recomputed logits: 6 N H V FLOPs.

    Rows whose upstream gradients are 0 are skipped.

    columns: lse, entropy, and the upstream gradients of logps and entropy, [N] each.
    """
    if op.weight is None:
        out = op.rows.new_empty(op.rows.shape)
        op.backend.row_grads(op.rows, op.targets, *columns, op.scaling(), out, op.softcap)
        return out, None, None
    live = op.targets != IGNORE
    head, used = Head(op, needs, live), live & ((columns[2] != 0) | (columns[3] != 0))
    head.add_gradients(op, torch.stack(tuple(columns)), *sort_tokens(used, used))
    return head.gradients()
