"""The losses: plan the tokens, pass over the rows once or twice, reduce; and autograd functions.

The losses compute their gradients in the forward pass, where every coefficient is known and the
rows are still in cache; the backward pass only scales them. The upstream gradients of the
log-probability functions are unknown until the backward pass, which recomputes the probabilities.
Notation: N tokens, S sequences, V vocabulary size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from . import linear
from .contract import IGNORE, LossSpec, compute_dtype
from .filter import FilterReport
from .linear import ASYNCHRONOUS, Gradients, Head, capturing, head_stats, sort_tokens, unsorted
from .reference import Coupling, coupling, select_outputs, token_gradients, token_terms
from .tokens import (
    BatchInputs,
    NeedsGrad,
    Operands,
    Tokens,
    TokenTerms,
    has_zero_gradient,
    part,
    power_above,
    scale_for_float16,
    with_factors,
)

# What `Fused` needs of a loss: the loss and the outputs that are not differentiable; the
# gradients of the loss, divided by the third part, `inv_scale` (see `scale_for_float16`).
Result = tuple[tuple[Any, ...], Gradients, Tensor | None]


def fused_loss(
    op: Operands,
    inputs: BatchInputs,
    spec: LossSpec,
    needs: NeedsGrad,
    moments: bool = True,
    overwrite: bool = False,  # the logits, by their gradient
) -> Result:
    """Compute the loss and its gradients in 6 N H V FLOPs.

    Outputs: the loss, and a LossOutput whose log-probs and entropies are [N].

    Rows whose gradient is known to be 0 need only the forward GEMM. A loss that depends on sums of
    current log-probs over sequences takes 8 N H V: these are computed first.
    """
    tokens = with_factors(op.backend.plan(inputs, spec, compute_dtype(op.dtype)), inputs, spec)
    out, kind = None, coupling(tokens, spec)
    if tokens.temperature is not None:
        op = op._replace(temperatures=tokens.temperature)
    if op.weight is None and needs.rows:  # a buffer for the gradient of the logits
        reuse = overwrite and has_distinct_elements(op.rows)
        out = op.rows.detach() if reuse else op.rows.new_empty(op.rows.shape)
    if kind is Coupling.CURRENT:
        passed = _two_passes(op, tokens, spec, needs, out)
    elif kind is Coupling.NONE:  # a sequence ratio is 1 or unused
        one_ratio = (
            spec
            if spec.importance_sampling_level == "token"
            else replace(spec, importance_sampling_level="token")
        )
        passed = _one_pass(op, tokens, one_ratio, needs, out)
    else:
        # on-policy, the gradient of "clip" is -A, and that of a sequence's ratio is the mean of -A
        plain = replace(
            spec,
            policy_loss="clip",
            clip_low=None,
            clip_high=None,
            importance_sampling_level="token",
        )
        passed = _one_pass(op, tokens.averaged(), plain, needs, out)
        logps, entropy, *_ = passed[0]
        passed = token_terms(logps, entropy, tokens, spec), *passed[1:]
    terms, grads, inv_scale, report = passed
    out = op.backend.reduce(tokens, terms, moments)
    filtered = None if report is None else FilterReport(*report)
    return (out.loss, out._replace(filter=filtered)), grads, inv_scale


def has_distinct_elements(x: Tensor) -> bool:
    """Whether no two elements of `x` share memory, unlike in an expanded tensor."""
    span = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span += stride * (size - 1)
    return True


# the terms, the gradients, `inv_scale` and the report of the filter
Pass = tuple[TokenTerms, Gradients, Tensor | None, Tensor | None]


def _one_pass(
    op: Operands,
    tokens: Tokens,
    spec: LossSpec,
    needs: NeedsGrad,
    out: Tensor | None,
) -> Pass:
    """Compute the loss of tokens that do not depend on each other."""
    inv_scale, tokens = scale_for_float16(tokens, spec, op.dtype)
    if op.weight is None:
        terms = op.backend.row_loss(op.rows, tokens, spec, out, op.softcap)
        return terms, (out, None, None), inv_scale, None
    need_gradient = any(needs)
    has_gradient = ~has_zero_gradient(tokens, spec) if need_gradient else None
    head = Head(op, needs, tokens.live)
    order, counts = sort_tokens(tokens.live, has_gradient)
    ordered, results = tokens.at(order), head.zeros(len(TokenTerms._fields))
    for block in head.blocks(order, counts):
        arguments = ordered.at(block.tokens), spec, block.out, op.softcap
        terms = op.backend.row_loss(block.logits, *arguments, block.marks)
        torch.stack(terms, out=results[:, block.tokens])
    terms = TokenTerms(*unsorted(results, order))
    return terms, head.gradients(), inv_scale, head.report()


def _two_passes(
    op: Operands,
    tokens: Tokens,
    spec: LossSpec,
    needs: NeedsGrad,
    out: Tensor | None,
) -> Pass:
    """Compute all log-probs first, then the gradient from the derivative of each."""
    need_gradient = any(needs)
    head, scaling = None, op.scaling()
    if op.weight is None:
        stats = torch.stack(op.backend.row_stats(op.rows, tokens.targets, scaling, op.softcap))
    else:
        head, known = Head(op, needs, tokens.live), tokens
        if spec.importance_sampling_level == "sequence":  # depends on the tokens of the sequence
            known = tokens.averaged(absolute=True)
        stats, order, counts = head_stats(op, head, ~has_zero_gradient(known, spec))
    logps, entropy, lse = stats
    terms, upstream = token_gradients(logps, entropy, tokens, spec, need_gradient)
    if upstream is None:
        return terms, (None, None, None), None, None
    inv_scale = None
    if op.dtype == torch.float16:
        inv_scale = power_above((upstream / scaling).abs())
        upstream = upstream / inv_scale
    columns = torch.cat([lse[None], entropy[None], upstream])
    if head is None:
        op.backend.row_grads(op.rows, tokens.targets, *columns, scaling, out, op.softcap)
        return terms, (out, None, None), inv_scale, None
    if order.device.type not in ASYNCHRONOUS:  # the exact rows cost no synchronization
        used = (upstream != 0).any(0)
        order, counts = sort_tokens(used, used)
    head.add_gradients(op, columns, order, counts)
    return terms, head.gradients(), inv_scale, head.report()


def token_loss(
    op: Operands,
    function: Callable[..., Tensor],  # (logps [M], entropy [M], *inputs, *outputs) -> losses [M]
    inputs: Sequence[Tensor],  # [N] each
    outputs: Sequence[str],  # of MORE_OUTPUTS
    needs: NeedsGrad,
) -> Result:
    """Compute a loss of each token's log-prob and entropy, and its gradients, in 6 N H V FLOPs.

    Outputs: the sum of the losses, the losses, logps, entropy and the requested outputs, [N] each,
    and the fields of `filter.FilterReport`, float32 [2].

    The derivatives of a block's losses come from autograd on its [M] log-probs and entropies.
    """
    live = op.targets != IGNORE
    head, more_outputs = Head(op, needs, live), len(outputs) > 0
    half = op.dtype == torch.float16  # the scale of its gradients follows the largest derivative
    inv_scale = op.rows.new_full((), 2.0**-100, dtype=torch.float32) if half else None
    order, counts = sort_tokens(live, live if any(needs) else None)
    targets, scaling, inputs = op.targets[order], op.scaling(order), [x[order] for x in inputs]
    results = head.zeros(6 if more_outputs else 3)  # losses, logps, entropy and MORE_OUTPUTS
    nonzero = torch.zeros_like(live)
    for block in head.blocks(order, counts, nonzero):
        span = block.tokens
        rows, temperature = (block.logits, targets[span]), part(scaling, span)
        logps, entropy, lse, *extra = op.backend.row_stats(
            *rows, temperature, op.softcap, more_outputs
        )
        columns = *(x[span] for x in inputs), *select_outputs(extra, outputs)
        losses, derivatives = differentiate(
            function, logps, entropy, columns, block.out is not None
        )
        torch.stack([losses, logps, entropy, *extra], out=results[:, span])
        if derivatives is not None:
            upstream = torch.stack(derivatives)
            nonzero[span] = (upstream != 0).any(0)
            if inv_scale is not None:
                size = (upstream / temperature).abs()
                largest, fits = power_above(size).maximum(inv_scale), size.max() <= 64 * inv_scale
                larger = torch.where(fits, inv_scale, largest)  # no logit's gradient overflows
                if capturing(live.device) or larger != inv_scale:  # the host waits here
                    head.rescale(inv_scale / larger, block.before)
                inv_scale, upstream = larger, upstream / larger
            stats, options = (lse, entropy, *upstream), (temperature, block.out, op.softcap)
            op.backend.row_grads(*rows, *stats, *options, marks=block.marks)
    losses, logps, entropy, *extra = torch.where(live, unsorted(results, order), 0)
    total = losses.sum(dtype=torch.float64).to(losses.dtype)
    values = total, losses, logps, entropy, *select_outputs(extra, outputs), head.report()
    return values, head.gradients(), inv_scale


def differentiate(
    function: Callable[..., Tensor],
    logps: Tensor,  # [M], or [M, K]
    entropy: Tensor,  # [M]
    columns: Sequence[Tensor],
    need_gradient: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The user's losses [M] and, if needed, their derivatives in logps and entropy."""
    with torch.enable_grad() if need_gradient else torch.no_grad():
        leaves = [x.detach().requires_grad_(need_gradient) for x in (logps, entropy)]
        losses = function(*leaves, *columns)
        kind = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if kind != list(entropy.shape):
            raise ValueError(
                f"token_loss returned {kind}: return one loss per token, a tensor of shape "
                f"{list(entropy.shape)}"
            )
        upstream = None
        if losses.requires_grad:
            total = losses.sum()
            d_logps, d_entropy = torch.autograd.grad(
                total, leaves, allow_unused=True, materialize_grads=True
            )
            upstream = d_logps, d_entropy
        elif need_gradient:  # a loss that depends on neither
            upstream = torch.zeros_like(logps), torch.zeros_like(entropy)
    return losses.detach().to(logps.dtype), upstream


def refuse_double_backward(grad_enabled: bool) -> None:
    """Raise RuntimeError on a double backward, which would treat the gradient as a constant."""
    if grad_enabled:
        raise RuntimeError(
            "the fused functions are differentiable once: for a double backward "
            "(create_graph=True), use the function of the same name in gac_kernels.reference"
        )


class Fused(Function):
    """A loss of `Operands`, whose rows, weight and bias are also the first arguments.

    `function(op, *arguments)`, one of `loss`, computes it and its gradients. The outputs of its
    `Result` that are not differentiable are appended to `outputs`: autograd need not see them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        op: Operands,
        function: Callable[..., Result],
        arguments: tuple[Any, ...],
        outputs: list[Any],
    ) -> Tensor:
        with without_autocast(op):
            (total, *others), grads, inv_scale = function(op, *arguments)
        outputs += others
        grad = grads[0]
        if weight is None and grad is not None and 0 < grad.data_ptr() == rows.data_ptr():
            # autograd must detect that saved logits have changed; empty tensors are at address 0
            increment_version(rows)
        ctx.backend, ctx.inv_scale, ctx.used = op.backend, inv_scale, False
        ctx.dtypes = [None if x is None else x.dtype for x in op[:3]]
        # scaled float16 gradients are rounded only after unscaling
        ctx.save_for_backward(*(cast(grads, ctx.dtypes) if inv_scale is None else grads))
        return total

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients in place by the upstream gradient (0-d)."""
        refuse_double_backward(torch.is_grad_enabled())
        if ctx.used:
            raise RuntimeError(
                "a second backward through the same loss is not possible: the first one scaled its "
                "stored gradients in place; compute the loss again, or add the losses before "
                "backward"
            )
        ctx.used, grads = True, ctx.saved_tensors
        factor = d_loss if ctx.inv_scale is None else d_loss * ctx.inv_scale
        if not factor.is_cpu or factor.item() != 1:
            for grad in grads:
                if grad is not None:
                    ctx.backend.scale_(grad, factor)
        return *cast(grads, ctx.dtypes), None, None, None, None


class TokenLogprobs(Function):
    """Log-probs of `Operands`: logps [N], entropy [N], and MORE_OUTPUTS if `more_outputs`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        op: Operands,
        more_outputs: bool,
    ) -> tuple[Tensor, ...]:
        with without_autocast(op):
            stats = linear.row_stats(op, more_outputs)
        ctx.save_for_backward(*op[:5], stats[2], stats[1])
        ctx.settings = op[5:]
        # no views of one tensor, and none that is saved: users may modify them
        logps, entropy, _, *extra = (x.clone() for x in stats)
        ctx.mark_non_differentiable(*extra)
        return logps, entropy, *extra

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor, d_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        *operands, lse, entropy = ctx.saved_tensors
        op = Operands(*operands, *ctx.settings)
        columns = lse, entropy, d_logps, d_entropy
        with without_autocast(op):
            grads = linear.row_grads(op, columns, NeedsGrad(*ctx.needs_input_grad[:3]))
        dtypes = [None if x is None else x.dtype for x in op[:3]]
        return (*cast(grads, dtypes), None, None)


def without_autocast(op: Operands) -> AbstractContextManager[object]:
    """Autocast is applied already, as `op.dtype`; without a head there is nothing it applies to."""
    if op.weight is None or not torch.is_autocast_enabled(op.rows.device.type):
        return nullcontext()  # entering a context takes longer than the check
    return torch.autocast(op.rows.device.type, enabled=False)


def cast(
    grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, ...]:
    """Convert each gradient to the dtype of its operand."""
    return tuple(
        [x if x is None or x.dtype is y else x.to(y) for x, y in zip(grads, dtypes, strict=True)]
    )
