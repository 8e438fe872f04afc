"""The chunked head: hidden x weight -> token terms and gradients, never the whole [N, V].

Tokens are taken a chunk at a time: logits of the chunk (one GEMM), the backend's row function, and,
for rows that carry a gradient, the two GEMMs of the backward. Rows without a loss enter no GEMM.
Legend: N tokens, V vocabulary, H hidden size, M rows of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import IGNORE, LossSpec
from .lanes import Lane
from .reference import arithmetic
from .tokens import Tokens, TokenTerms, dead

# Bytes of the logits of the chunks in flight. Every chunk reads and writes the [V, H] weight
# gradient once more, so they are as large as the memory target allows: 1 GiB in all on a GPU.
CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 960 << 20}
ALIGN = 128  # rows of a GEMM tile


class Needs(NamedTuple):
    """Which of the three inputs want a gradient."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, *inputs: Tensor | None) -> Needs:
        """Those that require one, while gradients are enabled."""
        learning = torch.is_grad_enabled()
        return cls(*(x is not None and x.requires_grad and learning for x in inputs))


class GemmOptions(NamedTuple):
    """How hidden is multiplied with the weight."""

    compute: torch.dtype  # what the operands are rounded to, as autocast would
    chunk_bytes: int | None = None  # memory for the logits in flight; None = CHUNK_BYTES


class InputGradients(NamedTuple):
    """Gradients in the inputs' dtypes; None where none is wanted."""

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]


class Chunk(NamedTuple):
    """M tokens between their GEMMs."""

    where: Tensor  # int64 [M]: which tokens
    rows: Tensor  # [M, H], a GEMM operand
    logits: Tensor  # [M, V]
    inputs: Any  # per token, for the row kernel


class Projection:
    """weight [V, H] and bias [V] as GEMM operands, and the buffers that all chunks share.

    Operands are rounded to `compute`, as autocast would. CUDA multiplies them in that dtype into
    float32; the CPU has no such GEMM and multiplies float32 copies (of the whole weight, once).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, options: GemmOptions) -> None:
        compute, chunk_bytes = options
        self.compute, self.exact = compute, arithmetic(compute)
        self.product = operand_dtype(weight.device, compute)
        self.weight = self.operand(weight)
        self.bias = None if bias is None else bias.to(compute).to(self.exact)
        self.lane = Lane(weight.device)
        budget = chunk_bytes or CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cuda"])
        rows = budget // (self.exact.itemsize * weight.shape[0] * self.lane.depth)
        self.rows = max(rows // ALIGN * ALIGN, min(rows, ALIGN), 1)
        self._logits: list[Tensor | None] = [None] * self.lane.depth

    @property
    def rounds(self) -> bool:
        """The gradient of the logits is rounded to the operands' dtype for its GEMMs."""
        return self.product != self.exact

    def operand(self, x: Tensor) -> Tensor:
        return x.to(self.compute).to(self.product)

    def spans(self, start: int, stop: int) -> Iterator[slice]:
        """Slices of [start, stop) of at most `rows`, equal but for a tile, the longest first.

        Whole tiles of a GEMM, since one that is filled in part costs as much; the last is the rest.
        """
        tile = ALIGN if self.rows >= ALIGN else 1
        for left in range(math.ceil((stop - start) / self.rows), 0, -1):
            size = min(math.ceil((stop - start) / (left * tile)) * tile, stop - start)
            yield slice(start, start + size)
            start += size

    def logits(self, rows: Tensor) -> Tensor:
        """[M, H] -> [M, V] in float32 or better, in a buffer for as many calls as chunks fly."""
        size = (len(rows), self.weight.shape[0])
        buffer = self._logits.pop(0)
        if buffer is None or len(buffer) < len(rows):
            buffer = None  # freed first: the old and the new one are beyond the budget together
            buffer = torch.empty(size, dtype=self.exact, device=rows.device)
        self._logits.append(buffer)
        out = buffer[: len(rows)]
        multiply(rows, self.weight.T, out)
        return out if self.bias is None else out.add_(self.bias)

    def gradient_buffer(self, logits: Tensor) -> Tensor:
        """[M, V] in the logits' own storage: the first half of each row where it is half as wide.

        So a chunk takes 4 bytes per logit, not 6, and is half as long again.
        """
        return logits.view(self.product)[:, : logits.shape[1]] if self.rounds else logits

    def release(self) -> None:
        """Give the logits' memory back."""
        self._logits = [None] * self.lane.depth


class Accumulator:
    """Sums the gradients of hidden, weight and bias over chunks; weight and bias in float32."""

    def __init__(self, projection: Projection, hidden: Tensor, needs: Needs) -> None:
        self.projection, self.needs, self.chunks = projection, needs, 0
        weight = projection.weight
        self.hidden = torch.zeros(
            hidden.shape if needs.hidden else (0,), dtype=hidden.dtype, device=hidden.device
        )
        self.weight = torch.empty(
            weight.shape if needs.weight else (0,), dtype=projection.exact, device=weight.device
        )
        self.bias = torch.zeros(weight.shape[0], dtype=projection.exact, device=weight.device)

    def add(self, grad: Tensor, rows: Tensor, index: Tensor) -> None:
        """grad [M, V] of the logits, their inputs rows [M, H], and the tokens [M] they are of."""
        if self.needs.hidden:
            back = grad @ self.projection.weight
            self.hidden.index_copy_(0, index, back.to(self.hidden.dtype))
        if self.needs.weight:
            multiply(grad.T, rows, self.weight, accumulate=self.chunks > 0)
        if self.needs.bias:
            self.bias += grad.sum(0, dtype=self.projection.exact)
        self.chunks += 1

    def finish(self) -> InputGradients:
        """The sums, unrounded: [N, H] in hidden's dtype, the other two in float32 or better."""
        self.projection.release()  # rounding the sums takes memory of its own
        if self.chunks == 0:
            self.weight.zero_()
        return InputGradients(
            self.hidden if self.needs.hidden else None,
            self.weight if self.needs.weight else None,
            self.bias if self.needs.bias else None,
        )


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


def capturing(device: torch.device) -> bool:
    """Under a CUDA graph capture no count may be read: every row is multiplied."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def split(live: Tensor, learns: Tensor) -> tuple[Tensor, int, int]:
    """Order the tokens [gradient rows | forward-only rows | rows without a loss].

    Returns (order [N], gradient rows, rows with a loss); one host synchronisation on a GPU.
    """
    if capturing(live.device):
        return torch.arange(len(live), device=live.device), len(live), len(live)
    rank = 2 - live.to(torch.int8) - learns.to(torch.int8)
    gradient, alive = torch.stack([learns.sum(), live.sum()]).tolist()
    return rank.argsort(stable=True), gradient, alive


def fused_loss(
    hidden: Tensor,  # [N, H]
    projection: Projection,
    tokens: Tokens,
    spec: LossSpec,
    backend: ModuleType,
    needs: Needs,
) -> tuple[TokenTerms, InputGradients]:
    """Token terms [N], and the gradients of sum(tokens.scale * loss): 6 N H V FLOPs.

    Rows whose gradient is known to be 0 take the forward GEMM only.
    """
    learns = ~dead(tokens, spec) if any(needs) else torch.zeros_like(tokens.live)
    order, gradient, alive = split(tokens.live, learns)
    if not any(needs):
        gradient = 0
    found = torch.zeros(
        len(TokenTerms._fields), len(hidden), dtype=projection.exact, device=hidden.device
    )
    sums = Accumulator(projection, hidden, needs)

    def multiply(span: slice) -> Chunk:
        index = order[span]
        chunk = tokens.select(index)
        rows = gather(hidden, index, chunk.live, projection)
        return Chunk(index, rows, projection.logits(rows), chunk)

    def forward(chunk: Chunk, out: Tensor | None = None) -> None:
        terms = backend.row_loss(chunk.logits[None], chunk.inputs, spec, out)
        found.index_copy_(1, chunk.where, torch.stack(terms))

    def learn(chunk: Chunk) -> None:
        forward(chunk, projection.gradient_buffer(chunk.logits)[None])

    def add(chunk: Chunk) -> None:
        sums.add(projection.gradient_buffer(chunk.logits), chunk.rows, chunk.where)

    projection.lane.each(projection.spans(0, gradient), multiply, learn, add)
    projection.lane.each(projection.spans(gradient, alive), multiply, forward)
    return TokenTerms(*found), sums.finish()


def gather(hidden: Tensor, index: Tensor, live: Tensor, projection: Projection) -> Tensor:
    """Rows of hidden as a GEMM operand [M, H]."""
    rows = projection.operand(hidden.index_select(0, index))
    if capturing(hidden.device):  # 0 * nan of a row without a loss would reach weight.grad
        rows = rows.masked_fill(~live[:, None], 0)
    return rows


def token_stats(
    hidden: Tensor, projection: Projection, targets: Tensor, temperature: float, backend: ModuleType
) -> tuple[Tensor, Tensor, Tensor]:
    """logps, entropy and lse, [N] each: 2 N H V FLOPs."""
    live = targets != IGNORE
    order, _, alive = split(live, torch.zeros_like(live))
    found = torch.zeros(3, len(hidden), dtype=projection.exact, device=hidden.device)

    def multiply(span: slice) -> Chunk:
        index = order[span]
        rows = gather(hidden, index, live[index], projection)
        return Chunk(index, rows, projection.logits(rows), targets[index])

    def forward(chunk: Chunk) -> None:
        stats = backend.row_stats(chunk.logits[None], chunk.inputs, temperature)
        found.index_copy_(1, chunk.where, torch.stack(stats))

    projection.lane.each(projection.spans(0, alive), multiply, forward)
    logps, entropy, lse = found.unbind()
    return logps, entropy, lse


def token_grads(
    hidden: Tensor,
    projection: Projection,
    targets: Tensor,
    stats: Tensor,  # [4, N]: lse, entropy, and the upstream gradients of logps and entropy
    temperature: float,
    backend: ModuleType,
    needs: Needs,
) -> InputGradients:
    """Gradients from recomputed logits, 6 N H V FLOPs; rows with no upstream gradient are left."""
    live = targets != IGNORE
    learns = live & (stats[2:] != 0).any(0)
    order, gradient, _ = split(live, learns)
    sums = Accumulator(projection, hidden, needs)

    def multiply(span: slice) -> Chunk:
        index = order[span]
        rows = gather(hidden, index, live[index], projection)
        inputs = targets[index], *stats.index_select(1, index)
        return Chunk(index, rows, projection.logits(rows), inputs)

    def learn(chunk: Chunk) -> None:
        out = projection.gradient_buffer(chunk.logits)[None]
        backend.row_grads(chunk.logits[None], *chunk.inputs, temperature, out)

    def add(chunk: Chunk) -> None:
        sums.add(projection.gradient_buffer(chunk.logits), chunk.rows, chunk.where)

    projection.lane.each(projection.spans(0, gradient), multiply, learn, add)
    return sums.finish()
