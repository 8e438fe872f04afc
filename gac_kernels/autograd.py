"""Autograd functions behind the public API.

The losses compute their gradients in the forward pass, where every coefficient is known and the
rows are still in cache; the backward pass only scales them. The upstream gradients of the
log-probability functions are unknown until the backward pass, which recomputes the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from . import linear
from .contract import LossOutput, LossSpec, TokenMoments
from .linear import NeedsGrad, Scaling
from .passes import logits_loss
from .projection import GemmOptions, Projection
from .sketch import HeadSketch
from .tokens import Tokens, TokenTerms


def refuse_double_backward(grad_enabled: bool) -> None:
    """Raise RuntimeError on a double backward, which would treat the gradient as a constant."""
    if grad_enabled:
        raise RuntimeError(
            "the fused functions are differentiable once: for a double backward "
            "(create_graph=True), use the function of the same name in gac_kernels.reference"
        )


class LossTask(NamedTuple):
    """Arguments of the loss functions other than the differentiable inputs."""

    tokens: Tokens
    spec: LossSpec
    backend: Any  # a module of `backends`, or an object with the same functions
    moments: bool
    sketch: HeadSketch | None = None
    softcap: float | None = None


class FusedLoss(Function):
    """Loss from logits [B, T, V].

    Outputs: the scalars of `tokens.Summary`, logps, entropy, moments and head sketch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        task: LossTask,
        out: Tensor | None,  # buffer for the gradient; None if not needed
    ) -> tuple[Tensor | None, ...]:
        settings = task.tokens, task.spec, task.backend, out, task.softcap
        terms, ctx.inv_scale = logits_loss(logits, *settings)
        if out is not None:
            if out.data_ptr() == logits.data_ptr():
                increment_version(logits)  # autograd must detect that saved logits have changed
            ctx.save_for_backward(out)
            ctx.backend = task.backend
        return _outputs(ctx, task, terms)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        if d_loss is None:
            return None, None, None
        (grad,) = _scale_saved(ctx, d_loss)
        return grad, None, None


class TokenLogprobs(Function):
    """Log-probs from logits [B, T, V]: logps [N], entropy [N], and MORE_OUTPUTS if `more`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        scaling: Scaling,
        more: bool,
        backend: ModuleType,
    ) -> tuple[Tensor, ...]:
        logps, entropy, lse, *extra = backend.row_stats(logits, targets, *scaling, more)
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.scaling, ctx.backend = scaling, backend
        ctx.mark_non_differentiable(*extra)
        return logps, entropy, *extra

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor, d_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        logits, targets, lse, entropy = ctx.saved_tensors
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        upstream = d_logps.contiguous(), d_entropy.contiguous()
        settings = ctx.scaling.temperature, out, ctx.scaling.softcap
        ctx.backend.row_grads(logits, targets, lse, entropy, *upstream, *settings)
        return out, None, None, None, None


class FusedLinearLoss(Function):
    """Loss from hidden [N, H], weight [V, H] and bias [V]: the outputs of `FusedLoss`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        task: LossTask,
        needs: NeedsGrad,
        options: GemmOptions,
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            projection = Projection(weight, bias, options)
            result = linear.fused_loss(
                *(hidden, projection, task.tokens, task.spec, task.backend, needs),
                *(task.sketch, task.softcap),
            )
        ctx.backend, ctx.inv_scale, sums = task.backend, result.inv_scale, result.grads
        ctx.dtypes = tuple(x if x is None else x.dtype for x in (hidden, weight, bias))
        # scaled float16 gradients are rounded only after unscaling
        ctx.save_for_backward(*(_cast(sums, ctx.dtypes) if ctx.inv_scale is None else sums))
        return _outputs(ctx, task, result.terms, result.sketch)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        if d_loss is None:
            return (None,) * 6
        return (*_cast(_scale_saved(ctx, d_loss), ctx.dtypes), None, None, None)


class LinearLogprobs(Function):
    """Log-probs from hidden [N, H], weight [V, H], bias [V]; same outputs as `TokenLogprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scaling: Scaling,
        more: bool,
        backend: ModuleType,
        options: GemmOptions,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            projection = Projection(weight, bias, options)
            stats = linear.token_stats(hidden, projection, targets, scaling, backend, more)
        logps, entropy, lse, *extra = stats.unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.settings = scaling, backend, options
        ctx.mark_non_differentiable(*extra)
        return logps, entropy, *extra

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor, d_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        scaling, backend, options = ctx.settings
        needs = NeedsGrad(*ctx.needs_input_grad[:3])
        stats = torch.stack([lse, entropy, d_logps.to(lse.dtype), d_entropy.to(lse.dtype)])
        with torch.autocast(hidden.device.type, enabled=False):
            projection = Projection(weight, bias, options)
            grads = linear.token_grads(hidden, projection, targets, stats, scaling, backend, needs)
        dtypes = tuple(x if x is None else x.dtype for x in (hidden, weight, bias))
        return (*_cast(grads, dtypes), *(None,) * 5)


def _outputs(
    ctx: Any, task: LossTask, terms: TokenTerms, sketch: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Reduce the terms to the flat outputs of a loss function; only the loss is differentiable."""
    *scalars, statistics = task.backend.reduce(task.tokens, terms, task.moments)
    flat: tuple[Tensor | None, ...] = (None,) * 3
    if statistics is not None:
        flat = statistics.rollouts, statistics.demo_nll, statistics.totals
    flat = (*flat, sketch)
    detached = [x for x in (*scalars[1:], terms.logps, terms.entropy, *flat) if x is not None]
    ctx.mark_non_differentiable(*detached)
    ctx.set_materialize_grads(False)
    return (*scalars, terms.logps, terms.entropy, *flat)


def _scale_saved(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
    """Scale the saved gradients in place by the upstream gradient (0-d)."""
    grads = ctx.saved_tensors
    factor = d_loss if ctx.inv_scale is None else d_loss * ctx.inv_scale
    if factor.device.type != "cpu" or factor.item() != 1:
        for grad in grads:
            if grad is not None:
                ctx.backend.scale_(grad, factor)
                # autograd must reject a second backward, which would scale twice
                increment_version(grad)
    return grads


def _cast(
    grads: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype | None, ...]
) -> tuple[Tensor | None, ...]:
    """Convert each gradient to its input's dtype."""
    return tuple(
        None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)
    )


def loss_output(flat: Sequence[Any], shape: torch.Size) -> LossOutput:
    """Build a LossOutput from the flat outputs of `FusedLoss` or `FusedLinearLoss`."""
    *scalars, logps, entropy, rollouts, demo_nll, totals, sketch = flat
    moments = None if rollouts is None else TokenMoments(rollouts, demo_nll, totals)
    return LossOutput._make((*scalars, logps.view(shape), entropy.view(shape), moments, sketch))
