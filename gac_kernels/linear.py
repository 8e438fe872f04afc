"""The chunked head: hidden x weight -> token terms and gradients, without materializing all [N, V]
logits.

Tokens are processed in chunks (see `projection`): one GEMM for the logits of each block, the
backend's row function and, for rows with a gradient, the two backward GEMMs. Rows
without a loss enter no GEMM. Notation: N tokens, V vocabulary size, H hidden size, M rows of a
chunk or block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import projection
from .contract import IGNORE, LossSpec
from .projection import Projection, spans
from .sketch import HeadSketch, Sides
from .sketcher import Sketcher
from .tokens import Tokens, TokenTerms, dead

# With at least this many elements, a weight gradient has more GEMM tiles than a GPU has
# multiprocessors, so the GEMM does not split its sums (no split-K): each float32 sum is rounded
# only once.
WHOLE_SUMS = 1 << 24


class Needs(NamedTuple):
    """Which of the three inputs need a gradient."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, *inputs: Tensor | None) -> Needs:
        """From `requires_grad` of the inputs; all False if gradients are disabled."""
        learning = torch.is_grad_enabled()
        return cls(*(x is not None and x.requires_grad and learning for x in inputs))


class InputGradients(NamedTuple):
    """Gradients of the inputs, None if not needed. `hidden` has its own dtype; the others are
    float32 or better.
    """

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H]; in the weight's dtype if a single GEMM computed it
    bias: Tensor | None  # [V]


class Accumulator:
    """Sums the gradients of hidden, weight and bias over chunks."""

    def __init__(self, head: Projection, hidden: Tensor, needs: Needs) -> None:
        self.head, self.needs = head, needs
        self.hidden = torch.zeros(
            hidden.shape if needs.hidden else (0,), dtype=hidden.dtype, device=hidden.device
        )
        self.weight: Tensor | None = None  # allocated by the first chunk
        words = head.weight.shape[0] if needs.bias else 0
        self.bias = torch.zeros(words, dtype=head.exact, device=hidden.device)

    def add(self, grad: Tensor, rows: Tensor, index: Tensor, alone: bool) -> None:
        """Add a chunk: grad [M, V] of the logits, their input rows [M, H] and token indices [M].

        alone: this is the only chunk.
        """
        if self.needs.hidden:
            back = self.head.back(grad)
            self.hidden.index_copy_(0, index, back.to(self.hidden.dtype))
        if self.needs.weight:
            first = self.weight is None
            if self.weight is None:
                self.weight = self._weight(alone)
            projection.multiply(grad.T, rows, self.weight, accumulate=not first)
        if self.needs.bias:
            self.bias += grad.sum(0, dtype=self.head.exact)

    def _weight(self, alone: bool) -> Tensor:
        """Buffer [V, H] in float32 or better; for a single chunk, in the weight's dtype if a GEMM
        can output it.

        Not for float16, whose gradients must still be unscaled (`tokens.in_units`).
        """
        head, dtype = self.head, self.head.exact
        if alone and head.product == head.given != torch.float16:
            dtype = head.given if head.weight.numel() >= WHOLE_SUMS else dtype
        return torch.empty(head.weight.shape, dtype=dtype, device=head.weight.device)

    def finish(self) -> InputGradients:
        self.head.release()  # free the buffers first: rounding the sums needs memory too
        if self.needs.weight and self.weight is None:
            self.weight = self._weight(alone=False).zero_()
        return InputGradients(
            self.hidden if self.needs.hidden else None,
            self.weight,
            self.bias if self.needs.bias else None,
        )


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured. Counts cannot be read then, so every row is
    multiplied.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def split(live: Tensor, learns: Tensor) -> tuple[Tensor, int, int]:
    """Order the tokens [gradient rows | forward-only rows | rows without a loss].

    Returns (order [N], gradient rows, rows with a loss). This is the only host synchronization on a
    GPU: launch as much as possible before it, or the device idles afterwards.
    """
    if capturing(live.device):
        return torch.arange(len(live), device=live.device), len(live), len(live)
    rank = 2 - live.to(torch.int8) - learns.to(torch.int8)
    order = rank.argsort(stable=True)
    gradient, alive = torch.stack([learns.sum(), live.sum()]).tolist()
    return order, gradient, alive


def gather(hidden: Tensor, index: Tensor, live: Tensor, head: Projection) -> Tensor:
    """Rows of hidden as a GEMM operand [M, H]."""
    rows = head.operand(hidden.index_select(0, index))
    if capturing(
        hidden.device
    ):  # otherwise a nan in a row without a loss would reach weight.grad as 0 * nan
        rows = rows.masked_fill(~live[index, None], 0)
    return rows


def run(
    hidden: Tensor,
    head: Projection,
    order: Tensor,  # int64: the tokens to process
    live: Tensor,  # bool [N]
    kernel: Callable[[Tensor, Tensor], None],  # (tokens [M], logits [1, M, V])
) -> None:
    """Forward only: pass the logits of each block to a row function that only reads them."""
    for span in spans(0, len(order), head.block):
        index = order[span]
        kernel(index, head.logits(gather(hidden, index, live, head))[None])


def learn(
    hidden: Tensor,
    order: Tensor,
    live: Tensor,
    kernel: Callable[[Tensor, Tensor, Tensor], None],  # (tokens [M], logits, gradient [1, M, V])
    sums: Accumulator,
) -> None:
    """Forward and backward: the row function also writes the gradient of its logits, which is
    accumulated in `sums`.
    """
    head, alone = sums.head, len(order) <= sums.head.chunk
    for span in spans(0, len(order), head.chunk):
        index = order[span]
        rows, grad = gather(hidden, index, live, head), head.gradient(len(index))
        for block in spans(0, len(index), head.block):
            logits = head.logits(rows[block], grad[block])
            kernel(index[block], logits[None], grad[block][None])
        sums.add(grad, rows, index, alone)


def fused_loss(
    hidden: Tensor,  # [N, H]
    head: Projection,
    tokens: Tokens,
    spec: LossSpec,
    backend: ModuleType,
    needs: Needs,
    sketch: HeadSketch | None = None,
) -> tuple[TokenTerms, InputGradients, Sides | None]:
    """Token terms [N], gradients of sum(tokens.scale * loss) and sketch factors: 6 N H V FLOPs.

    Rows whose gradient is known to be 0 need only the forward GEMM.
    """
    wanted = any(needs) or sketch is not None
    learns = ~dead(tokens, spec) if wanted else torch.zeros_like(tokens.live)
    found = hidden.new_zeros(len(TokenTerms._fields), len(hidden), dtype=head.exact)
    sums = Accumulator(head, hidden, needs)
    sketcher = None if sketch is None else Sketcher(sketch, head, len(hidden))
    order, gradient, alive = split(tokens.live, learns)
    if not wanted:
        gradient = 0

    def kernel(index: Tensor, logits: Tensor, out: Tensor | None = None) -> None:
        rows = None if sketcher is None or out is None else sketcher.rows(len(index))
        terms = backend.row_loss(logits, tokens.select(index), spec, out, rows)
        found.index_copy_(1, index, torch.stack(terms))
        if sketcher is not None and rows is not None:
            sketcher.keep(index, rows)

    learn(hidden, order[:gradient], tokens.live, kernel, sums)
    run(hidden, head, order[gradient:alive], tokens.live, kernel)
    if sketcher is None:
        return TokenTerms(*found), sums.finish(), None
    for span in spans(0, gradient, head.chunk):
        index = order[span]
        sketcher.project(index, gather(hidden, index, tokens.live, head))
    return TokenTerms(*found), sums.finish(), sketcher.sides


def token_stats(
    hidden: Tensor, head: Projection, targets: Tensor, temperature: float, backend: ModuleType
) -> tuple[Tensor, Tensor, Tensor]:
    """logps, entropy and lse, [N] each: 2 N H V FLOPs."""
    live = targets != IGNORE
    found = hidden.new_zeros(3, len(hidden), dtype=head.exact)
    order, _, alive = split(live, torch.zeros_like(live))

    def kernel(index: Tensor, logits: Tensor) -> None:
        stats = backend.row_stats(logits, targets[index], temperature)
        found.index_copy_(1, index, torch.stack(stats))

    run(hidden, head, order[:alive], live, kernel)
    logps, entropy, lse = found.unbind()
    return logps, entropy, lse


def token_grads(
    hidden: Tensor,
    head: Projection,
    targets: Tensor,
    stats: Tensor,  # [4, N]: lse, entropy, and the upstream gradients of logps and entropy
    temperature: float,
    backend: ModuleType,
    needs: Needs,
) -> InputGradients:
    """Gradients from recomputed logits, 6 N H V FLOPs; rows with no upstream gradient are skipped."""
    live = targets != IGNORE
    learns = live & (stats[2:] != 0).any(0)
    sums = Accumulator(head, hidden, needs)
    order, gradient, _ = split(live, learns)

    def kernel(index: Tensor, logits: Tensor, out: Tensor) -> None:
        columns = stats.index_select(1, index)
        backend.row_grads(logits, targets[index], *columns, temperature, out)

    learn(hidden, order[:gradient], live, kernel, sums)
    return sums.finish()
