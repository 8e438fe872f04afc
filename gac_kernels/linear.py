"""The chunked head: hidden x weight -> token terms and gradients, never the whole [N, V].

Tokens are taken a chunk at a time (see `projection`): logits of a block of it (one GEMM), the
backend's row function, and, for rows that carry a gradient, the two GEMMs of the backward. Rows
without a loss enter no GEMM. Legend: N tokens, V vocabulary, H hidden size, M rows at a time.
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
from .tokens import Tokens, TokenTerms, dead

# From so many elements on, a weight gradient has more GEMM tiles than a GPU has multiprocessors, so
# that no element is summed in parts: rounding its float32 sum, once, is all that happens to it.
WHOLE_SUMS = 1 << 24


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


class InputGradients(NamedTuple):
    """None where none is wanted; hidden in its dtype, the others summed in float32 or better."""

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H]; in the weight's dtype where one sum made it
    bias: Tensor | None  # [V]


class Accumulator:
    """Sums the gradients of hidden, weight and bias over chunks."""

    def __init__(self, head: Projection, hidden: Tensor, needs: Needs) -> None:
        self.head, self.needs = head, needs
        self.hidden = torch.zeros(
            hidden.shape if needs.hidden else (0,), dtype=hidden.dtype, device=hidden.device
        )
        self.weight: Tensor | None = None  # made by the first chunk
        words = head.weight.shape[0] if needs.bias else 0
        self.bias = torch.zeros(words, dtype=head.exact, device=hidden.device)

    def add(self, grad: Tensor, rows: Tensor, index: Tensor, alone: bool) -> None:
        """grad [M, V] of the logits, their inputs rows [M, H], and the tokens [M] they are of.

        alone: no other chunk follows or went before.
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
        """[V, H] in float32 or better; of a single sum in the weight's own dtype, if a GEMM has it.

        float16 is kept for later: its gradients still lack a factor (`tokens.in_units`).
        """
        head, dtype = self.head, self.head.exact
        if alone and head.product == head.given != torch.float16:
            dtype = head.given if head.weight.numel() >= WHOLE_SUMS else dtype
        return torch.empty(head.weight.shape, dtype=dtype, device=head.weight.device)

    def finish(self) -> InputGradients:
        self.head.release()  # rounding the sums takes memory of its own
        if self.needs.weight and self.weight is None:
            self.weight = self._weight(alone=False).zero_()
        return InputGradients(
            self.hidden if self.needs.hidden else None,
            self.weight,
            self.bias if self.needs.bias else None,
        )


def capturing(device: torch.device) -> bool:
    """Under a CUDA graph capture no count may be read: every row is multiplied."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def split(live: Tensor, learns: Tensor) -> tuple[Tensor, int, int]:
    """Order the tokens [gradient rows | forward-only rows | rows without a loss].

    Returns (order [N], gradient rows, rows with a loss). The one host synchronisation on a GPU:
    whatever can be launched before it should be, or the device would wait for it afterwards.
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
    if capturing(hidden.device):  # 0 * nan of a row without a loss would reach weight.grad
        rows = rows.masked_fill(~live[index, None], 0)
    return rows


def run(
    hidden: Tensor,
    head: Projection,
    order: Tensor,  # int64: the tokens to take
    live: Tensor,  # bool [N]
    kernel: Callable[[Tensor, Tensor], None],  # (tokens [M], logits [1, M, V])
) -> None:
    """The logits of every block, for a row function that only reads them."""
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
    """As `run`; the row function writes the gradient of its logits, which is added to `sums`."""
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
) -> tuple[TokenTerms, InputGradients]:
    """Token terms [N], and the gradients of sum(tokens.scale * loss): 6 N H V FLOPs.

    Rows whose gradient is known to be 0 take the forward GEMM only.
    """
    learns = ~dead(tokens, spec) if any(needs) else torch.zeros_like(tokens.live)
    found = hidden.new_zeros(len(TokenTerms._fields), len(hidden), dtype=head.exact)
    sums = Accumulator(head, hidden, needs)
    order, gradient, alive = split(tokens.live, learns)
    if not any(needs):
        gradient = 0

    def kernel(index: Tensor, logits: Tensor, out: Tensor | None = None) -> None:
        terms = backend.row_loss(logits, tokens.select(index), spec, out)
        found.index_copy_(1, index, torch.stack(terms))

    learn(hidden, order[:gradient], tokens.live, kernel, sums)
    run(hidden, head, order[gradient:alive], tokens.live, kernel)
    return TokenTerms(*found), sums.finish()


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
    """Gradients from recomputed logits, 6 N H V FLOPs; rows with no upstream gradient are left."""
    live = targets != IGNORE
    learns = live & (stats[2:] != 0).any(0)
    sums = Accumulator(head, hidden, needs)
    order, gradient, _ = split(live, learns)

    def kernel(index: Tensor, logits: Tensor, out: Tensor) -> None:
        columns = stats.index_select(1, index)
        backend.row_grads(logits, targets[index], *columns, temperature, out)

    learn(hidden, order[:gradient], live, kernel, sums)
    return sums.finish()
