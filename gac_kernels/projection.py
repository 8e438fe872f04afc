"""hidden x weight in pieces: the GEMM operands, how many rows at a time, and the memory for them.

A chunk of rows makes its logits block by block, keeps their gradient in the operands' dtype, and
gives it to the two GEMMs of the backward in one piece: those want many rows, each of their passes
over the [V, H] weight gradient costs a read and a write of it; the logits want few, being wider.
Legend: V vocabulary, H hidden size, M rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .reference import arithmetic

# Bytes in flight. On a GPU that is 512 rows of logits and 2304 of gradients for 152064 words.
CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1000 << 20}
ALIGN = 128  # rows of a GEMM tile


class GemmOptions(NamedTuple):
    """How hidden is multiplied with the weight."""

    compute: torch.dtype  # what the operands are rounded to, as autocast would
    chunk_bytes: int | None = None  # memory for what is in flight; None = CHUNK_BYTES
    words: int | None = None  # of the vocabulary, to share it by; None = the weight's own


class Buffer:
    """Rows [M, V] in memory that the longest request so far decides."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width, self.dtype, self.device = width, dtype, device
        self.held: Tensor | None = None

    def rows(self, count: int) -> Tensor:
        if self.held is None or len(self.held) < count:
            self.held = None  # freed first: the old and the new one are beyond the budget together
            self.held = torch.empty(count, self.width, dtype=self.dtype, device=self.device)
        return self.held[:count]


class Projection:
    """weight [V, H] and bias [V] as GEMM operands, and the buffers that all chunks share.

    Operands are rounded to `compute`, as autocast would. CUDA multiplies them in that dtype into
    float32; the CPU has no such GEMM and multiplies float32 copies (of the whole weight, once).
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
        """The gradient of the logits is rounded to the operands' dtype for its GEMMs."""
        return self.product != self.exact

    def _cut(self, budget: int, words: int) -> tuple[int, int]:
        """Rows of a chunk and of a block.

        A gradient that is not rounded lies where the logits were: there, a chunk is one block.
        Else the rows of hidden and their gradient count too, for a narrow vocabulary has many.
        """
        logit = self.exact.itemsize * words
        if not self.rounds:
            rows = _whole_tiles(budget // logit)
            return rows, rows
        block = _whole_tiles(4 * budget // (13 * logit))  # the rest makes it about 2 rows to 9
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
        """[M, H] -> [M, V] in float32 or better, where the next call's go too.

        gradient: [M, V] where their gradient will be; without rounding, they are made there.
        """
        out = gradient
        if out is None or self.rounds:
            out = self._logits.rows(len(rows))
        multiply(rows, self.weight.T, out)
        return out if self.bias is None else out.add_(self.bias)

    def back(self, gradient: Tensor) -> Tensor:
        """[M, V] -> [M, H] in float32 or better: partial sums in bfloat16, which a GEMM with that
        output may make of so long a sum, would lose digits.

        With rounding it lies where the logits were, if there is room: they are done with.
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
        """Give the memory of the buffers back."""
        self._logits.held = self._gradient.held = None


def spans(start: int, stop: int, rows: int) -> Iterator[slice]:
    """Slices of [start, stop) of at most `rows`, equal but for a tile, the longest first.

    Whole tiles of a GEMM, since one that is filled in part costs as much; the last is the rest.
    """
    tile = ALIGN if rows >= ALIGN else 1
    for left in range(math.ceil((stop - start) / rows), 0, -1):
        size = min(math.ceil((stop - start) / (left * tile)) * tile, stop - start)
        yield slice(start, start + size)
        start += size


def _whole_tiles(rows: int) -> int:
    return max(rows // ALIGN * ALIGN, min(rows, ALIGN), 1)


def operand_dtype(device: torch.device, compute: torch.dtype) -> torch.dtype:
    """What the GEMMs read: only CUDA multiplies half precision into float32."""
    return compute if device.type == "cuda" else arithmetic(compute)


def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """out = a @ b, or out += a @ b; summed and kept in out's dtype."""
    if a.dtype == out.dtype:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out.dtype, out=out)
    else:
        torch.mm(a, b, out.dtype, out=out)
