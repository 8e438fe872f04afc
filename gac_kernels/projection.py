"""Chunked hidden x weight: GEMM operands, chunk sizes and buffers.

The logits of a chunk are computed block by block; their gradient is stored in the operands' dtype
and passed to the two backward GEMMs at once. The backward GEMMs need many rows, because every chunk
reads and writes the whole [V, H] weight gradient; the float32 logits take more memory per row, so a
block has fewer rows.
Notation: V vocabulary size, H hidden size, M rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .reference import arithmetic

# Memory budget in bytes. On a GPU it holds 512 rows of logits and 2304 rows of gradients at V =
# 152064.
CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1000 << 20}
ALIGN = 128  # rows of a GEMM tile


class GemmOptions(NamedTuple):
    """How hidden is multiplied by the weight."""

    compute: torch.dtype  # dtype that the operands are rounded to, as under autocast
    chunk_bytes: int | None = (
        None  # memory budget for logits and their gradients; None = CHUNK_BYTES
    )
    words: int | None = None  # vocabulary size for the chunk sizes; None = rows of the weight


class Buffer:
    """A reusable [M, V] buffer that grows to the largest request."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width, self.dtype, self.device = width, dtype, device
        self.held: Tensor | None = None

    def rows(self, count: int) -> Tensor:
        if self.held is None or len(self.held) < count:
            self.held = None  # free it first: old and new together would exceed the budget
            self.held = torch.empty(count, self.width, dtype=self.dtype, device=self.device)
        return self.held[:count]


class Projection:
    """weight [V, H] and bias [V] as GEMM operands, and the buffers shared by all chunks.

    Operands are rounded to `compute`, as autocast would. On CUDA they are multiplied in that dtype
    with float32 output; the CPU has no such GEMM and multiplies float32 copies (the weight is
    copied once).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, options: GemmOptions) -> None:
        self.compute, self.exact = options.compute, arithmetic(options.compute)
        self.product = operand_dtype(weight.device, options.compute)
        self.given = weight.dtype
        self.weight = self.operand(weight)
        self.bias = None if bias is None else bias.to(self.compute).to(self.exact)
        budget = options.chunk_bytes or CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cuda"])
        self.chunk, self.block = self._cut(budget, options.words or weight.shape[0])
        self._logits = Buffer(weight.shape[0], self.exact, weight.device)
        self._gradient = self._logits
        if self.rounds:
            self._gradient = Buffer(weight.shape[0], self.product, weight.device)

    @property
    def rounds(self) -> bool:
        """Whether the gradient of the logits is rounded to the operands' dtype for the GEMMs."""
        return self.product != self.exact

    def _cut(self, budget: int, words: int) -> tuple[int, int]:
        """Rows per chunk and rows per block.

        Without rounding, the gradient overwrites the logits, so a chunk is a single block.
        With rounding, the rows of hidden and their gradient count too: for a small vocabulary there
        are many.
        """
        logit = self.exact.itemsize * words
        if not self.rounds:
            rows = _whole_tiles(budget // logit)
            return rows, rows
        block = _whole_tiles(
            4 * budget // (13 * logit)
        )  # gives about 2 rows per block to 9 per chunk
        chunk = (budget - block * logit) // (
            self.product.itemsize * (words + 2 * self.weight.shape[1])
        )
        return max(_whole_tiles(chunk), block), block

    def operand(self, x: Tensor) -> Tensor:
        return x.to(self.compute).to(self.product)

    def gradient(self, count: int) -> Tensor:
        """[M, V] for the gradient of one chunk's logits, in the operands' dtype."""
        return self._gradient.rows(count)

    def logits(self, rows: Tensor, gradient: Tensor | None = None) -> Tensor:
        """[M, H] -> [M, V] in float32 or better, in a buffer that the next call reuses.

        gradient: [M, V] buffer for their gradient; without rounding, the logits are written there.
        """
        out = gradient
        if out is None or self.rounds:
            out = self._logits.rows(len(rows))
        multiply(rows, self.weight.T, out)
        return out if self.bias is None else out.add_(self.bias)

    def back(self, gradient: Tensor) -> Tensor:
        """[M, V] -> [M, H] in float32 or better: with bfloat16 output, a GEMM may also round
        partial sums (split-K) and lose precision over the long sum.

        With rounding, the result reuses the logits buffer if it is large enough; the logits are no
        longer needed.
        """
        shape = len(gradient), self.weight.shape[1]
        held = self._logits.held if self.rounds else None
        if held is not None and held.numel() >= math.prod(shape):
            out = held.view(-1)[: math.prod(shape)].view(shape)
        else:
            out = torch.empty(shape, dtype=self.exact, device=gradient.device)
        multiply(gradient, self.weight, out)
        return out

    def release(self) -> None:
        """Free the buffers."""
        self._logits.held = self._gradient.held = None


def spans(start: int, stop: int, rows: int) -> Iterator[slice]:
    """Split [start, stop) into slices of at most `rows`, longest first, whose sizes differ by at
    most one tile.

    Slices are whole GEMM tiles, because a partly filled tile costs as much as a full one; the last
    slice takes the remainder.
    """
    tile = ALIGN if rows >= ALIGN else 1
    for left in range(math.ceil((stop - start) / rows), 0, -1):
        size = min(math.ceil((stop - start) / (left * tile)) * tile, stop - start)
        yield slice(start, start + size)
        start += size


def _whole_tiles(rows: int) -> int:
    return max(rows // ALIGN * ALIGN, min(rows, ALIGN), 1)


def operand_dtype(device: torch.device, compute: torch.dtype) -> torch.dtype:
    """Dtype of the GEMM operands: only CUDA has half-precision GEMMs with float32 output."""
    return compute if device.type == "cuda" else arithmetic(compute)


def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """out = a @ b, or out += a @ b; accumulated and stored in out's dtype."""
    if a.dtype == out.dtype:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out.dtype, out=out)
    else:
        torch.mm(a, b, out.dtype, out=out)
