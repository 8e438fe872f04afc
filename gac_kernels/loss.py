"""The losses: plan the tokens, pass over the rows once or twice, reduce; and autograd functions.

The losses compute their gradients in the forward pass, where every coefficient is known and the
rows are still in cache; the backward pass only scales them. The upstream gradients of the
log-probability functions are unknown until the backward pass, which recomputes the probabilities.
Notation: N tokens, S sequences, V vocabulary size, H hidden size.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from .contract import IGNORE, LossSpec
from .epilogue import choose, make_head
from .linear import begin, blocks, first_rows, read_counts
from .projection import Gradients, Head, Result, empty_gradient, in_smaller_chunks
from .reference import (
    TwoCalls,
    own_logps,
    select_outputs,
    teacher_terms,
    token_gradients,
    token_terms,
)
from .teacher import TeacherRows
from .tokens import (
    ASYNCHRONOUS,
    BatchInputs,
    Counts,
    NeedsGrad,
    Operands,
    RowOrder,
    Tokens,
    TokenTerms,
    Upstream,
    has_zero_gradient,
    power_above,
    scale_for_float16,
    sort_tokens,
    split_columns,
    stack_columns,
    with_factors,
    with_teacher_loss,
)


@in_smaller_chunks
def fused_loss(
    op: Operands,
    inputs: BatchInputs,
    spec: LossSpec,
    needs: NeedsGrad,
    *,
    moments: bool = True,
    overwrite: bool = False,  # the logits, by their gradient
) -> Result:
    """Compute the loss and its gradients in 6 N H V FLOPs.

    Outputs: the loss, and a LossOutput.

    Rows whose gradient is known to be 0 need only the forward GEMM. A loss that depends on sums of
    current log-probs over sequences takes 8 N H V: these are computed first.
    """
    off_policy = inputs.old_logps is not None
    kind = coupling(
        spec,
        off_policy=off_policy,
        corrects_current=inputs.rollout_logps is not None
        and (spec.masks_probabilities or not off_policy),
    )
    tokens = with_factors(op.backend.plan(inputs, spec, op.accum_dtype), inputs, spec)
    op = with_formulas(op, tokens, spec)
    op = choose(op, entropy=spec.entropy_coef != 0)
    buffer = None
    if op.weight is None and needs.rows:  # for the gradient of the logits
        reuse = overwrite and has_distinct_elements(op.rows)
        buffer = op.rows.detach() if reuse else gradient_like(op.rows)
    passes = _two_passes if kind is Coupling.CURRENT else _one_pass
    done = passes(op, tokens, spec, needs, kind, buffer)
    logps = done.terms.logps
    terms = done.terms._replace(logps=own_logps(logps).contiguous())
    out = op.backend.reduce(tokens, terms, moments)
    if tokens.teacher is not None:
        out = with_teacher_loss(out, tokens, teacher_terms(logps, tokens, spec), spec)
    return Result((out.loss, out.shaped(inputs.targets.shape)), done.gradients, done.inv_scale)


def with_formulas(op: Operands, tokens: Tokens, spec: LossSpec) -> Operands:
    """The operands with a backend for the formulas that the row kernels lack, if the loss has any.

    A teacher's K tokens, and the rest, become further targets of their row.
    """
    teacher = tokens.teacher
    has_teacher = teacher is not None and spec.teacher_coef != 0
    if (has_teacher or spec.masks_probabilities) and not isinstance(op.backend, TwoCalls):
        op = replace(op, backend=TwoCalls(op.backend))
    if teacher is None or teacher.ids is None:
        return op
    return replace(op, targets=tokens.row_targets, backend=TeacherRows(op.backend))


def gradient_like(logits: Tensor) -> Tensor:
    """Allocate the gradient of given logits."""
    return empty_gradient(tuple(logits.shape), logits.dtype, logits.device)


class Coupling(enum.Enum):
    """How the gradient of a token depends on the other tokens of its sequence."""

    NONE = enum.auto()
    KNOWN = enum.auto()  # through numbers that are known in advance
    CURRENT = enum.auto()  # through their current log-probabilities


def coupling(spec: LossSpec, *, off_policy: bool, corrects_current: bool) -> Coupling:
    """Determine the coupling; only CURRENT requires a pass over the logits in advance.

    off_policy: there are log-probabilities of the sampling policy.
    corrects_current: the correction is that of the current log-probabilities.
    """
    through_ratio = spec.policy_loss not in ("cispo", "reinforce")
    has_kl_ratio = spec.use_bias_correction_kl and spec.kl_coef != 0
    if corrects_current and spec.correction.startswith("sequence"):
        return Coupling.CURRENT
    if spec.importance_sampling_level == "token":
        return Coupling.NONE
    if off_policy and (spec.policy_loss != "reinforce" or has_kl_ratio):
        return Coupling.CURRENT
    if has_kl_ratio or (through_ratio and corrects_current):
        return Coupling.CURRENT
    return Coupling.KNOWN if through_ratio else Coupling.NONE


def has_distinct_elements(x: Tensor) -> bool:
    """Whether no two elements of `x` share memory, unlike in an expanded tensor."""
    span = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span += stride * (size - 1)
    return True


class Pass(NamedTuple):
    """The results of all rows."""

    terms: TokenTerms
    gradients: Gradients = (None, None, None)
    inv_scale: Tensor | None = None


def _one_pass(
    op: Operands,
    plan: Tokens,
    spec: LossSpec,
    needs: NeedsGrad,
    kind: Coupling,
    buffer: Tensor | None,  # for the gradient of the logits, if they are given
) -> Pass:
    """Compute the loss of tokens whose gradients do not depend on each other's log-probs."""
    whole, tokens = spec, plan
    if spec.importance_sampling_level == "sequence":
        spec = replace(spec, importance_sampling_level="token")  # the ratio is 1 or unused
    if kind is Coupling.KNOWN:
        # on-policy, the gradient of "clip" is -A, and that of a sequence's ratio is the mean of -A
        spec = replace(spec, policy_loss="clip", clip_low=None, clip_high=None)
        tokens = plan.averaged()
    inv_scale, tokens = scale_for_float16(tokens, spec, op.dtype)
    if op.weight is None:
        terms = op.backend.row_loss(op.rows, tokens, spec, buffer, softcap=op.softcap)
        done = Pass(terms, (buffer, None, None), inv_scale)
    else:
        if tokens.temperature is not None:
            op = replace(op, temperatures=tokens.temperature)
        head = make_head(op, needs)
        zero_gradient = functools.partial(has_zero_gradient, tokens, spec) if any(needs) else None
        order = _order(op, head, tokens.live, zero_gradient)
        ordered = tokens if order.tokens is None else tokens.at(order.tokens)
        results = RowResults(op, order, len(TokenTerms._fields))
        order, first = begin(head, order)
        for block in blocks(head, order, first):
            terms = op.backend.row_loss(
                block.logits,
                ordered.at(block.tokens),
                spec,
                block.out,
                softcap=op.softcap,
            )
            results.put(block.tokens, terms)
        terms = TokenTerms(*results.restore())
        done = Pass(terms, head.gradients(), inv_scale)
    if kind is Coupling.KNOWN:
        logps = done.terms.logps
        terms = token_terms(own_logps(logps), done.terms.entropy, plan, whole)
        done = done._replace(terms=terms._replace(logps=logps))
    return done


def _two_passes(
    op: Operands,
    tokens: Tokens,
    spec: LossSpec,
    needs: NeedsGrad,
    kind: Coupling,
    buffer: Tensor | None,
) -> Pass:
    """Compute all log-probs first, then the gradient from the derivative of each."""
    if tokens.temperature is not None:
        op = replace(op, temperatures=tokens.temperature)
    head = order = None
    if op.weight is None:
        stats: Sequence[Tensor] = op.backend.row_stats(op.rows, op.targets, op.scaling)
    else:
        head, known = make_head(op, needs), tokens
        if spec.importance_sampling_level == "sequence":  # depends on the tokens of the sequence
            known = tokens.averaged(absolute=True)
        zero_gradient = functools.partial(has_zero_gradient, known, spec) if any(needs) else None
        order = _order(op, head, tokens.live, zero_gradient)
        stats, order = _stats_pass(op, head, order)
    logps, entropy, lse = stats
    terms, derivatives = token_gradients(logps, entropy, tokens, spec, any(needs))
    if derivatives is None:
        return Pass(terms)
    d_logps, d_entropy = derivatives
    inv_scale = None
    if op.dtype == torch.float16:
        sizes = stack_columns(d_logps, d_entropy)
        inv_scale = power_above((sizes / op.scaling.temperature).abs())
        d_logps, d_entropy = d_logps / inv_scale, d_entropy / inv_scale
    upstream = Upstream(lse, entropy, d_logps, d_entropy)
    if head is None or order is None:
        op.backend.row_grads(op.rows, op.targets, op.scaling, upstream, buffer)
        return Pass(terms, (buffer, None, None), inv_scale)
    if op.rows.device.type not in ASYNCHRONOUS:  # the exact rows cost no synchronization
        used = (stack_columns(d_logps, d_entropy) != 0).any(0)
        order = sort_tokens(used, used)
    _gradient_pass(op, head, order, upstream)
    return Pass(terms, head.gradients(), inv_scale)


@in_smaller_chunks
def row_stats(op: Operands, *, more_outputs: bool = False) -> Sequence[Tensor]:
    """Compute logps, entropy and lse, and MORE_OUTPUTS if `more_outputs`: [N]; 2 N H V FLOPs.

    With K targets per row, logps is [N, K].
    """
    if op.weight is None:
        return op.backend.row_stats(op.rows, op.targets, op.scaling, more_outputs=more_outputs)
    op = choose(op, entropy=False, more_outputs=more_outputs)
    head = make_head(op, NeedsGrad(rows=False, weight=False, bias=False))
    if _skips_rows(op, head, gradient=False):
        order = sort_tokens(op.live, None)
    else:
        order = RowOrder(None, (0, len(op.targets)))
    return _stats_pass(op, head, order, more_outputs=more_outputs)[0]


def _skips_rows(op: Operands, head: Head, *, gradient: bool) -> bool:
    """Whether a pass leaves out the rows that need no GEMM.

    Without a gradient there is nothing to leave out if the first GEMM, for which the host does not
    wait, has all rows.
    """
    rows = len(op.targets)
    if not gradient and first_rows(head, rows) == rows:
        return False
    return op.skips_rows(gemms=2 if gradient else 1)


def _order(
    op: Operands, head: Head, live: Tensor, zero_gradient: Callable[[], Tensor] | None
) -> RowOrder:
    """The order of a pass over the rows of a head.

    live: bool [N], the tokens with a loss. zero_gradient: computes which tokens have no gradient,
    bool [N]; None: no token has one.
    """
    if _skips_rows(op, head, gradient=zero_gradient is not None):
        return sort_tokens(live, None if zero_gradient is None else ~zero_gradient())
    return RowOrder.whole(live, zero_gradient is not None)


class RowResults:
    """What a pass computes for each token, collected over its blocks."""

    def __init__(self, op: Operands, order: RowOrder, columns: int) -> None:
        self.op, self.order = op, order
        self._whole: Sequence[Tensor] | None = None  # the values, if one block has all tokens
        several = order.tokens is not None or not len(op.targets)
        self._columns = op.results(columns) if several else None

    def put(self, span: slice, values: Sequence[Tensor]) -> None:
        """Store the values of the tokens in a span of the pass, as in `stack_columns`."""
        if self.order.tokens is None and span.stop - span.start == len(self.op.targets):
            self._whole = values
            return
        if self._columns is None:
            self._columns = self.op.results(len(values))
        stack_columns(*values, out=self._columns[:, span])

    def restore(self) -> Sequence[Tensor]:
        """The values of all tokens in the batch's order, 0 where there is no loss."""
        if self._whole is not None:
            return self._whole
        assert self._columns is not None  # without an order, a pass has all tokens
        return split_columns(self.order.restore(self._columns), self.op.targets)


def _stats_pass(
    op: Operands, head: Head, order: RowOrder, *, more_outputs: bool = False
) -> tuple[Sequence[Tensor], RowOrder]:
    """Compute `row_stats`, and the order of the gradient pass: the rows that have one."""
    targets, scaling = order.select(op.targets), op.scaling.at(order.tokens)
    results = RowResults(op, order, 6 if more_outputs else 3)
    rows, first = len(targets), None
    remaining: Counts
    if isinstance(order.counts, Tensor) and first_rows(head, rows) == rows:
        # nothing is left out here, and the gradient pass reads the counts
        live_rows, remaining = rows, order.counts[:1].expand(2)
    else:
        order, first = begin(head, order, gradient=False)
        gradient_rows, live_rows = read_counts(order.counts)
        remaining = gradient_rows, gradient_rows
    for block in blocks(head, order._replace(counts=(0, live_rows)), first):
        stats = op.backend.row_stats(
            block.logits,
            targets[block.tokens],
            scaling.at(block.tokens),
            more_outputs=more_outputs,
        )
        results.put(block.tokens, stats)
    return results.restore(), order._replace(counts=remaining)


@in_smaller_chunks
def row_grads(op: Operands, upstream: Upstream, needs: NeedsGrad) -> Gradients:
    """Compute the gradients of the operands from recomputed logits: 6 N H V FLOPs.

    Rows whose upstream gradients are 0 are skipped.
    """
    if op.weight is None:
        out = gradient_like(op.rows)
        op.backend.row_grads(op.rows, op.targets, op.scaling, upstream, out)
        return out, None, None
    op, live = choose(op, entropy=True), op.live
    d_logps = of_targets(upstream.d_logps, op.targets)
    head = make_head(op, needs)
    if _skips_rows(op, head, gradient=True):
        nonzero = d_logps != 0 if op.targets.dim() == 1 else (d_logps != 0).any(1)
        used = live & (nonzero | (upstream.d_entropy != 0))
        order = sort_tokens(used, used)
    else:
        order = RowOrder.whole(live, has_gradient=True)
    _gradient_pass(op, head, order, upstream._replace(d_logps=d_logps))
    return head.gradients()


def _gradient_pass(op: Operands, head: Head, order: RowOrder, upstream: Upstream) -> None:
    """Add the gradients of the first tokens of `order`, given those of their outputs."""
    targets, scaling = order.select(op.targets), op.scaling.at(order.tokens)
    if order.tokens is not None:
        lse, entropy, d_logps, d_entropy = upstream
        columns = stack_columns(d_logps, lse, entropy, d_entropy).index_select(1, order.tokens)
        d_logps, lse, entropy, d_entropy = split_columns(columns, targets)
        upstream = Upstream(lse, entropy, d_logps, d_entropy)
    order, first = begin(head, order)
    for block in blocks(head, order, first):
        op.backend.row_grads(
            block.logits,
            targets[block.tokens],
            scaling.at(block.tokens),
            Upstream(*(x[block.tokens] for x in upstream)),
            block.out,
        )


@in_smaller_chunks
def token_loss(
    op: Operands,
    function: Callable[..., Tensor],  # (logps [M], entropy [M], *inputs, *outputs) -> losses [M]
    inputs: Sequence[Tensor],  # [N, ...] each
    outputs: Sequence[str],  # of MORE_OUTPUTS
    needs: NeedsGrad,
) -> Result:
    """Compute a loss of each token's log-prob and entropy, and its gradients, in 6 N H V FLOPs.

    With K targets per token, the log-probs are [M, K] and [N, K].

    Outputs: the sum of the losses, the losses, logps, entropy and the requested outputs, [N] each.

    The derivatives of a block's losses come from autograd on its [M] log-probs and entropies.
    """
    live = op.live
    more_outputs = len(outputs) > 0
    op = choose(op, entropy=True, more_outputs=more_outputs)
    half = op.dtype == torch.float16  # the scale of its gradients follows the largest derivative
    inv_scale = op.rows.new_full((), 2.0**-100, dtype=torch.float32) if half else None
    order, head = sort_tokens(live, live if any(needs) else None), make_head(op, needs)
    targets, scaling = order.select(op.targets), op.scaling.at(order.tokens)
    inputs = [order.select(x) for x in inputs]
    results = op.results(6 if more_outputs else 3)  # logps, losses, entropy and MORE_OUTPUTS
    nonzero = torch.zeros_like(live)
    order, first = begin(head, order)
    for block in blocks(head, order, first, nonzero=nonzero):
        span = block.tokens
        block_scaling = scaling.at(span)
        logps, entropy, lse, *extra = op.backend.row_stats(
            block.logits, targets[span], block_scaling, more_outputs=more_outputs
        )
        columns = *(x[span] for x in inputs), *select_outputs(extra, outputs)
        losses, derivatives = differentiate(
            function, logps, entropy, columns, need_gradient=block.out is not None
        )
        stack_columns(logps, losses, entropy, *extra, out=results[:, span])
        if derivatives is not None:
            d_logps, d_entropy = of_targets(derivatives[0], targets[span]), derivatives[1]
            upstream = stack_columns(d_logps, d_entropy)
            nonzero[span] = (upstream != 0).any(0)
            if inv_scale is not None:
                # every logit also gets a share of the sum over K targets
                sizes = upstream if d_logps.dim() == 1 else torch.vstack([upstream, d_logps.sum(1)])
                size = (sizes / block_scaling.temperature).abs()
                largest, fits = power_above(size).maximum(inv_scale), size.max() <= 64 * inv_scale
                larger = torch.where(fits, inv_scale, largest)  # no logit's gradient overflows
                if order.masked is not None or larger != inv_scale:  # the host waits here
                    head.rescale(inv_scale / larger, block.before)
                inv_scale, upstream = larger, upstream / larger
            op.backend.row_grads(
                block.logits,
                targets[span],
                block_scaling,
                Upstream(lse, entropy, *split_columns(upstream, targets)),
                block.out,
            )
    restored = torch.where(live, order.restore(results), 0)
    logps, losses, entropy, *extra = split_columns(restored, targets)
    total = losses.sum(dtype=torch.float64).to(losses.dtype)
    values = total, losses, logps, entropy, *select_outputs(extra, outputs)
    return Result(values, head.gradients(), inv_scale)


def of_targets(d_logps: Tensor, targets: Tensor) -> Tensor:
    """Upstream gradients of log-probs; 0 where one of K targets is missing.

    Rows without any target are skipped anyway.
    """
    return d_logps if targets.dim() == 1 else d_logps.masked_fill(targets == IGNORE, 0)


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
    """A loss of `Operands`, whose leaves are also the first arguments.

    `compute` returns the loss and its gradients. The outputs of its `Result` that are not
    differentiable are appended to `outputs`: autograd need not see them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        op: Operands,
        compute: Callable[[], Result],
        outputs: list[Any],
    ) -> Tensor:
        with without_autocast(op):
            (total, *others), grads, inv_scale = compute()
        outputs += others
        grad = grads[0]
        if weight is None and grad is not None and 0 < grad.data_ptr() == rows.data_ptr():
            # autograd must detect that saved logits have changed; empty tensors are at address 0
            increment_version(rows)
        ctx.backend, ctx.inv_scale, ctx.used = op.backend, inv_scale, False
        ctx.dtypes = [None if x is None else x.dtype for x in (rows, weight, bias)]
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
        return *cast(grads, ctx.dtypes), None, None, None


class TokenLogprobs(Function):
    """Log-probs of `Operands`, like its targets, entropy [N], and MORE_OUTPUTS if requested."""

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
            logps, entropy, lse, *extra = row_stats(op, more_outputs=more_outputs)
        ctx.save_for_backward(*op.tensors(), lse, entropy)
        ctx.settings = op.settings()
        # no views of one tensor, and none that is saved: users may modify them
        logps, entropy, *extra = (x.clone() for x in (logps, entropy, *extra))
        ctx.mark_non_differentiable(*extra)
        ctx.set_materialize_grads(False)
        return logps, entropy, *extra

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        if d_logps is None and d_entropy is None:
            return None, None, None, None, None
        *tensors, lse, entropy = ctx.saved_tensors
        op = Operands(**dict(zip(Operands.TENSORS, tensors, strict=True)), **ctx.settings)
        if d_logps is None:
            d_logps = torch.zeros_like(op.targets, dtype=lse.dtype)
        if d_entropy is None:
            d_entropy = torch.zeros_like(entropy)
        upstream = Upstream(lse, entropy, d_logps, d_entropy)
        with without_autocast(op):
            grads = row_grads(op, upstream, NeedsGrad(*ctx.needs_input_grad[:3]))
        dtypes = [None if x is None else x.dtype for x in op.leaves]
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
