"""The rows of a head, chunk by chunk and block by block, with the gradients of its operands.

Tokens are processed in chunks of blocks (see `projection`): one GEMM for the logits of each block,
the caller's row function and, for rows with a gradient, the two backward GEMMs of the chunk. Rows
without a loss enter no GEMM.
Notation: N tokens, V vocabulary size, M rows of a chunk or block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from .projection import Head, compact, spans
from .tokens import Counts, RowOrder


class Block(NamedTuple):
    """Consecutive rows of a pass."""

    tokens: slice  # of the order of the pass
    logits: Tensor  # [1, M, V]; the next block overwrites them
    out: Tensor | None = None  # [1, M, V]: where their gradient is written
    before: Tensor | None = None  # the gradient of the rows before it in its chunk


def read_counts(counts: Counts) -> tuple[int, int]:
    """The counts as numbers.

    The host waits for the device here: launch as much as possible before it, or the device idles
    afterwards.
    """
    gradient_rows, live_rows = counts.tolist() if isinstance(counts, Tensor) else counts
    return gradient_rows, live_rows


def blocks(head: Head, order: RowOrder, *, nonzero: Tensor | None = None) -> Iterator[Block]:
    """Yield the tokens with a loss; the caller writes the gradient of those that have one.

    A block's buffers are reused by the next one.

    nonzero: bool [N], in the same order and filled by the caller, tells which rows have a gradient;
    the backward GEMMs skip the others.
    """
    projection, (gradient_rows, stop) = head.projection, read_counts(order.counts)
    chunk_rows = projection.chunk_rows(gradient_rows, head.needs.weight)
    chunks = [*spans(0, gradient_rows, chunk_rows)]
    rest = [*spans(gradient_rows, stop, projection.block)]
    projection.reserve(max((x.stop - x.start for x in chunks[:1] + rest[:1]), default=0))

    for chunk in chunks:
        index = order.tokens[chunk]
        rows, grad = head.gather(index, order.masked), projection.gradient(len(index))
        for span in spans(0, len(index), projection.block):
            logits = projection.logits(rows[span], grad[span])
            tokens = slice(chunk.start + span.start, chunk.start + span.stop)
            yield Block(tokens, logits[None], grad[span][None], grad[: span.start])
        # the gradient of the chunk's logits is complete, and its backward GEMMs follow
        if nonzero is not None and order.masked is None:
            index, rows, grad = compact(nonzero[chunk], index, rows, grad)
        head.add(index, rows, grad, single_chunk=gradient_rows <= chunk_rows)
    for tokens in rest:
        rows = head.gather(order.tokens[tokens], order.masked)
        yield Block(tokens, projection.logits(rows)[None])
