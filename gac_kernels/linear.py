"""The chunked LM head: token terms and gradients without materializing all [N, V] logits.

Tokens are processed in chunks of blocks (see `projection`): one GEMM for the logits of each block,
the backend's row function and, for rows with a gradient, the two backward GEMMs of the chunk. Rows
without a loss enter no GEMM.
Notation: N tokens, V vocabulary size, H hidden size, M rows of a chunk or block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import projection
from .contract import IGNORE, LossSpec
from .passes import in_passes
from .projection import Projection, spans
from .sketch import HeadSketch, SketchFactors, per_sequence
from .sketcher import Sketcher
from .tokens import (
    Tokens,
    TokenTerms,
    has_zero_gradient,
    may_have_gradient,
    scale_for_float16,
)

# device types on which reading a count makes the host wait for the device
ASYNCHRONOUS = {"cuda"}


class Scaling(NamedTuple):
    """Scaling of logits x to z = softcap tanh(x / softcap) / temperature."""

    temperature: float
    softcap: float | None = None  # None: z = x / temperature


class NeedsGrad(NamedTuple):
    """Which of the three inputs need a gradient."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, *inputs: Tensor | None) -> NeedsGrad:
        """Read `requires_grad` of each input; all False if gradients are disabled."""
        grad_enabled = torch.is_grad_enabled()
        return cls(*(x is not None and x.requires_grad and grad_enabled for x in inputs))


class InputGradients(NamedTuple):
    """Gradients of the inputs, None if not needed."""

    hidden: Tensor | None  # [N, H], in its own dtype
    weight: Tensor | None  # [V, H], float32 or better; in its own dtype if one GEMM computed it
    bias: Tensor | None  # [V], float32 or better


class Accumulator:
    """Sums the gradients of hidden, weight and bias over chunks."""

    def __init__(self, head: Projection, hidden: Tensor, needs: NeedsGrad) -> None:
        self.head, self.needs = head, needs
        self.hidden = torch.zeros(
            hidden.shape if needs.hidden else (0,), dtype=hidden.dtype, device=hidden.device
        )
        self.weight: Tensor | None = None  # allocated by the first chunk
        vocab_size = head.weight.shape[0] if needs.bias else 0
        self.bias = torch.zeros(vocab_size, dtype=head.accum_dtype, device=hidden.device)

    def add(self, grad: Tensor, rows: Tensor, index: Tensor, single_chunk: bool) -> None:
        """Add a chunk: grad [M, V] of the logits, their input rows [M, H] and token indices [M]."""
        if self.needs.hidden:
            d_rows = self.head.hidden_gradient(grad)
            self.hidden.index_copy_(0, index, d_rows.to(self.hidden.dtype))
        if self.needs.weight:
            first = self.weight is None
            if self.weight is None:
                self.weight = self._weight(single_chunk)
            projection.multiply(grad.T, rows, self.weight, accumulate=not first)
        if self.needs.bias:
            self.bias += grad.sum(0, dtype=self.head.accum_dtype)

    def _weight(self, single_chunk: bool) -> Tensor:
        """Allocate the weight's gradient [V, H]; float32 or better unless one GEMM rounds it."""
        head = self.head
        rounded = single_chunk and head.writes_rounded(head.weight.numel())
        dtype = head.weight_dtype if rounded else head.accum_dtype
        return torch.empty(head.weight.shape, dtype=dtype, device=head.weight.device)

    def finish(self) -> InputGradients:
        self.head.release()  # free the buffers first: rounding the sums needs memory too
        if self.needs.weight and self.weight is None:
            self.weight = self._weight(single_chunk=False).zero_()
        return InputGradients(
            self.hidden if self.needs.hidden else None,
            self.weight,
            self.bias if self.needs.bias else None,
        )


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured; counts cannot be read then, so no row is skipped."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def partition_tokens(live: Tensor, has_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Order the tokens [rows with a gradient | forward-only rows | rows without a loss].

    Returns (order [N], counts): the numbers of rows with a gradient and of rows with a loss, for
    `read_counts`.
    """
    if capturing(live.device):
        return torch.arange(len(live), device=live.device), live
    group = 2 - live.to(torch.int8) - has_gradient.to(torch.int8)
    return group.argsort(stable=True), torch.stack([has_gradient.sum(), live.sum()])


def read_counts(counts: Tensor, tokens: int) -> tuple[int, int]:
    """The numbers of rows with a gradient and of rows with a loss.

    This is the only host synchronization on a GPU: launch as much as possible before it, or the
    device idles afterwards.
    """
    if capturing(counts.device):
        return tokens, tokens
    gradient_rows, live_rows = counts.tolist()
    return gradient_rows, live_rows


def early_logits(hidden: Tensor, head: Projection, order: Tensor, live: Tensor) -> Tensor | None:
    """Logits of the first rows in `order`: as many rows as the first block can have.

    Computed before their number is known, so that the device has work while the host waits for it.
    None if the host would not wait, or if the logits belong in the buffer of a whole chunk.
    """
    if hidden.device.type not in ASYNCHRONOUS or capturing(hidden.device) or not head.rounds:
        return None
    return head.logits(gather(hidden, order[: head.block], live, head))


def gather(hidden: Tensor, index: Tensor, live: Tensor, head: Projection) -> Tensor:
    """Gather rows of hidden as a GEMM operand [M, H]."""
    rows = head.operand(hidden.index_select(0, index))
    if capturing(
        hidden.device
    ):  # includes rows without a loss: a nan would add 0 * nan to weight.grad
        rows = rows.masked_fill(~live[index, None], 0)
    return rows


def forward_chunks(
    hidden: Tensor,
    head: Projection,
    order: Tensor,  # int64 [N]
    live: Tensor,  # bool [N]
    row_fn: Callable[[slice, Tensor], None],  # (span of `order`, logits [1, M, V])
    rows: tuple[int, int],  # start and end in `order`
    first: Tensor | None = None,  # logits of the first rows in `order`
) -> None:
    """Pass the logits of each block to `row_fn`, which only reads them."""
    for span in spans(*rows, head.block):
        if first is not None and span.start == 0:
            logits = first[: span.stop]
        else:
            logits = head.logits(gather(hidden, order[span], live, head))
        row_fn(span, logits[None])


def forward_backward_chunks(
    hidden: Tensor,
    order: Tensor,
    live: Tensor,
    row_fn: Callable[[slice, Tensor, Tensor], None],  # (span, logits, gradient [1, M, V])
    sums: Accumulator,
    count: int,  # rows with a gradient, the first in `order`
    first: Tensor | None = None,
) -> None:
    """Let `row_fn` write each block's logit gradient; add the gradients of the inputs to `sums`."""
    head = sums.head
    chunk_rows = head.chunk_rows(count, sums.needs.weight)
    for span in spans(0, count, chunk_rows):
        index = order[span]
        rows, grad = gather(hidden, index, live, head), head.gradient(len(index))
        for block in spans(0, len(index), head.block):
            if first is not None and span.start == block.start == 0:
                logits = first[: block.stop]
            else:
                logits = head.logits(rows[block], grad[block])
            part = slice(span.start + block.start, span.start + block.stop)
            row_fn(part, logits[None], grad[block][None])
        sums.add(grad, rows, index, single_chunk=count <= chunk_rows)


class LinearLoss(NamedTuple):
    """Result of `fused_loss`."""

    terms: TokenTerms
    grads: InputGradients  # of sum(tokens.scale * loss), divided by `inv_scale`
    sketch: Tensor | None  # [S, k, k]
    inv_scale: Tensor | None  # see `scale_for_float16`


def fused_loss(
    hidden: Tensor,  # [N, H]
    head: Projection,
    tokens: Tokens,
    spec: LossSpec,
    backend: ModuleType,
    needs: NeedsGrad,
    sketch: HeadSketch | None = None,
    softcap: float | None = None,
) -> LinearLoss:
    """Compute the token terms, the gradients and the sketch in 6 N H V FLOPs.

    Rows whose gradient is known to be 0 need only the forward GEMM. A loss that depends on sums of
    current log-probs over sequences takes 8 N H V: these are computed first.
    """
    need_gradient = any(needs) or sketch is not None
    first_count: int | None = None

    def logprobs() -> tuple[Tensor, Tensor]:
        nonlocal first_count
        has_gradient = may_have_gradient(tokens, spec)
        run = hidden, head, tokens.targets, Scaling(spec.temperature, softcap), backend
        (logps, entropy, _), first_count = _forward_stats(*run, False, has_gradient)
        return logps, entropy

    def one_pass(tokens: Tokens, spec: LossSpec) -> LinearLoss:
        inv_scale, scaled = scale_for_float16(tokens, spec, head.dtype)
        run = (
            hidden,
            head,
            scaled,
            spec,
            backend,
            needs,
            need_gradient,
            sketch,
            softcap,
            first_count,
        )
        terms, grads, factors = _one_pass(*run)
        sketches = None if factors is None else per_sequence(factors, scaled, spec, inv_scale)
        return LinearLoss(terms, grads, sketches, inv_scale)

    result, terms = in_passes(tokens, spec, need_gradient, logprobs, one_pass)
    if result is None:
        none = InputGradients(None, None, None)
        return LinearLoss(terms, none, None, None)
    return result._replace(terms=terms)


def _one_pass(
    hidden: Tensor,
    head: Projection,
    tokens: Tokens,
    spec: LossSpec,
    backend: ModuleType,
    needs: NeedsGrad,
    need_gradient: bool,
    sketch: HeadSketch | None,
    softcap: float | None,
    first_count: int | None,
) -> tuple[TokenTerms, InputGradients, SketchFactors | None]:
    """Compute the loss and its gradients in one pass; no token's terms may depend on another token.

    first_count: in the second of two passes, an upper bound of the number of rows with a gradient.
    The other rows are then skipped: their terms are known. Where reading the exact number would
    stop the host a second time, all `first_count` rows are multiplied, some by 0.
    """
    has_gradient = torch.zeros_like(tokens.live)
    if need_gradient:
        has_gradient = ~has_zero_gradient(tokens, spec)
    terms = hidden.new_zeros(len(TokenTerms._fields), len(hidden), dtype=head.accum_dtype)
    sums = Accumulator(head, hidden, needs)
    sketcher = None if sketch is None else Sketcher(sketch, head, len(hidden))
    order, counts = partition_tokens(tokens.live, has_gradient)
    ordered, results = tokens.select(order), torch.empty_like(terms)
    first = None
    if first_count is not None and hidden.device.type in ASYNCHRONOUS:
        gradient_rows = first_count
    else:
        first = early_logits(hidden, head, order, tokens.live)
        gradient_rows, live_rows = read_counts(counts, len(order))
    if first_count is not None:
        live_rows = gradient_rows
    if not need_gradient:
        gradient_rows = 0

    def row_fn(span: slice, logits: Tensor, out: Tensor | None = None) -> None:
        sketch_rows = None
        if sketcher is not None and out is not None:
            sketch_rows = sketcher.new_rows(logits.shape[1])
        block = backend.row_loss(logits, ordered.part(span), spec, out, sketch_rows, softcap)
        torch.stack(block, out=results[:, span])
        if sketcher is not None and sketch_rows is not None:
            sketcher.store(order[span], sketch_rows)

    forward_backward_chunks(hidden, order, tokens.live, row_fn, sums, gradient_rows, first)
    rest = gradient_rows, live_rows
    forward_chunks(hidden, head, order, tokens.live, row_fn, rest, first)
    terms.index_copy_(1, order[:live_rows], results[:, :live_rows])
    if sketcher is None:
        return TokenTerms(*terms), sums.finish(), None
    for span in spans(0, gradient_rows, head.chunk):
        index = order[span]
        sketcher.project(index, gather(hidden, index, tokens.live, head))
    return TokenTerms(*terms), sums.finish(), sketcher.factors


def token_stats(
    hidden: Tensor,
    head: Projection,
    targets: Tensor,
    scaling: Scaling,
    backend: ModuleType,
    more: bool = False,
) -> Tensor:
    """Compute logps, entropy and lse, and MORE_OUTPUTS if `more`: [3 or 6, N], 2 N H V FLOPs."""
    no_gradient = torch.zeros_like(targets, dtype=torch.bool)
    return _forward_stats(hidden, head, targets, scaling, backend, more, no_gradient)[0]


def _forward_stats(
    hidden: Tensor,
    head: Projection,
    targets: Tensor,
    scaling: Scaling,
    backend: ModuleType,
    more: bool,
    has_gradient: Tensor,
) -> tuple[Tensor, int]:
    """Compute `token_stats` and the number of rows with a gradient, in a single synchronization."""
    live = targets != IGNORE
    stats = hidden.new_zeros(6 if more else 3, len(hidden), dtype=head.accum_dtype)
    order, counts = partition_tokens(live, has_gradient)
    ordered, results = targets[order], torch.empty_like(stats)
    first = early_logits(hidden, head, order, live)
    gradient_rows, live_rows = read_counts(counts, len(order))

    def row_fn(span: slice, logits: Tensor) -> None:
        block = backend.row_stats(logits, ordered[span], *scaling, more)
        torch.stack(block, out=results[:, span])

    forward_chunks(hidden, head, order, live, row_fn, (0, live_rows), first)
    stats.index_copy_(1, order[:live_rows], results[:, :live_rows])
    return stats, gradient_rows


def token_grads(
    hidden: Tensor,
    head: Projection,
    targets: Tensor,
    stats: Tensor,  # [4, N]: lse, entropy, and the upstream gradients of logps and entropy
    scaling: Scaling,
    backend: ModuleType,
    needs: NeedsGrad,
) -> InputGradients:
    """Compute the gradients from recomputed logits: 6 N H V FLOPs.

    Rows whose upstream gradients are 0 are skipped.
    """
    live = targets != IGNORE
    has_gradient = live & (stats[2:] != 0).any(0)
    sums = Accumulator(head, hidden, needs)
    order, counts = partition_tokens(live, has_gradient)
    ordered, columns = targets[order], stats.index_select(1, order)
    first = early_logits(hidden, head, order, live)
    gradient_rows, _ = read_counts(counts, len(order))

    def row_fn(span: slice, logits: Tensor, out: Tensor) -> None:
        backend.row_grads(
            logits, ordered[span], *columns[:, span], scaling.temperature, out, scaling.softcap
        )

    forward_backward_chunks(hidden, order, live, row_fn, sums, gradient_rows, first)
    return sums.finish()
