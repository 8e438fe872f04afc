"""The rows of a head, chunk by chunk and block by block, with the gradients of its operands.

Tokens are processed in chunks of blocks (see `projection`): one GEMM for the logits of each block,
the caller's row function and, for rows with a gradient, the two backward GEMMs of the chunk. Rows
without a loss enter no GEMM.
Notation: N tokens, V vocabulary size, M rows of a chunk or block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .projection import Head, compact
from .tokens import ASYNCHRONOUS, Counts, RowOrder


class Block(NamedTuple):
    """Consecutive rows of a pass."""

    tokens: slice  # of the order of the pass
    logits: Any  # [1, M, V], or what `epilogue` has in their place; the next block overwrites them
    out: Tensor | None = None  # [1, M, V]: where their gradient is written
    before: Tensor | None = None  # the gradient of the rows before it in its chunk


class First(NamedTuple):
    """The logits of the first rows of a pass, launched before their number was read."""

    rows: int
    logits: Any  # as in `Block`

    def part(self, start: int, stop: int) -> Any:
        if isinstance(self.logits, Tensor):
            return self.logits[:, start:stop]
        return self.logits.part(start, stop)


def read_counts(counts: Counts) -> tuple[int, int]:
    """The counts as numbers; the host waits for the device here."""
    gradient_rows, live_rows = counts.tolist() if isinstance(counts, Tensor) else counts
    return gradient_rows, live_rows


def first_rows(head: Head, rows: int) -> int:
    """How many of a pass's rows enter a GEMM before the host reads which of them it needs."""
    return min(rows, head.projection.block) if head.hidden.device.type in ASYNCHRONOUS else 0


def begin(head: Head, order: RowOrder, *, gradient: bool = True) -> tuple[RowOrder, First | None]:
    """Read the counts of an order, and launch the first GEMM before that if it makes the host wait.

    Without it, the device would idle from the end of what it has to do until the host has read the
    counts and launched more. Rows of the first block may turn out to have no gradient, or no loss.

    gradient: whether the pass computes gradients.
    """
    counts, projection = order.counts, head.projection
    if not isinstance(counts, Tensor) or order.tokens is None:
        return order, None
    first = None
    if size := first_rows(head, len(order.tokens)):
        index = order.tokens[:size]
        projection.reserve(size)
        # exponentials are where their gradient will be
        in_place = gradient and any(head.needs) and not projection.stores_logits
        out = projection.gradient(size) if in_place else None
        first = First(size, head.logits(head.gather(index, None), index, out))
    return order._replace(counts=read_counts(counts)), first


def blocks(
    head: Head, order: RowOrder, first: First | None = None, *, nonzero: Tensor | None = None
) -> Iterator[Block]:
    """Yield the tokens with a loss; the caller writes the gradient of those that have one.

    A block's buffers are reused by the next one.

    order, first: from `begin`.
    nonzero: bool [N], in the same order and filled by the caller, tells which rows have a gradient;
    the backward GEMMs skip the others.
    """
    projection, (gradient_rows, stop) = head.projection, read_counts(order.counts)
    chunk_rows = projection.chunk_rows(gradient_rows, head.needs.weight)
    chunks = [*projection.spans(0, gradient_rows, chunk_rows)]
    # rows without a gradient of the first block come first
    known = min(first.rows, stop) if first is not None else 0
    known = max(known, gradient_rows)
    rest = [*projection.spans(known, stop, projection.block)]
    projection.reserve(max((x.stop - x.start for x in chunks[:1] + rest[:1]), default=0))

    for chunk in chunks:
        index, count = order.tokens_of(chunk), chunk.stop - chunk.start
        rows, grad = head.gather(index, order.masked), projection.gradient(count)
        for span in projection.spans(0, count, projection.block):
            tokens = slice(chunk.start + span.start, chunk.start + span.stop)
            if first is not None and tokens.start == 0:
                logits = first.part(0, tokens.stop)
            else:
                logits = head.logits(rows[span], order.tokens_of(tokens), grad[span])
            yield Block(tokens, logits, grad[span][None], grad[: span.start])
        # the gradient of the chunk's logits is complete, and its backward GEMMs follow
        if nonzero is not None and isinstance(index, Tensor):
            index, rows, grad = compact(nonzero[chunk], index, rows, grad)
        if first is not None and known > gradient_rows:  # its logits are still in their buffer
            yield Block(slice(gradient_rows, known), first.part(gradient_rows, known))
        head.add(index, rows, grad, single_chunk=gradient_rows <= chunk_rows)
    if first is not None and not chunks and known:
        yield Block(slice(0, known), first.part(0, known))
    for tokens in rest:
        index = order.tokens_of(tokens)
        rows = head.gather(index, None)  # nothing is added up over them
        yield Block(tokens, head.logits(rows, index, None))
