"""Autograd functions behind the public API.

The losses compute their gradients in the forward pass, where every coefficient is known and the
rows are still in cache; the backward pass only scales them. The upstream gradients of the
log-probability functions are unknown until the backward pass, which recomputes the probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from . import linear
from .contract import LossOutput, TokenMoments
from .filter import FilterReport
from .inputs import NeedsGrad, Operands
from .loss import Result


def refuse_double_backward(grad_enabled: bool) -> None:
    """Raise RuntimeError on a double backward, which would treat the gradient as a constant."""
    if grad_enabled:
        raise RuntimeError(
            "the fused functions are differentiable once: for a double backward "
            "(create_graph=True), use the function of the same name in gac_kernels.reference"
        )


class Fused(Function):
    """A loss of `Operands`, whose rows, weight and bias are also the first arguments.

    `function(op, *arguments)`, one of `loss`, computes it and its gradients. Returns the outputs of
    its `Result`, of which the first is differentiable.
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
    ) -> tuple[Tensor | None, ...]:
        with without_autocast(op):
            outputs, grads, inv_scale = function(op, *arguments)
        if weight is None and grads.rows is not None and grads.rows.data_ptr() == rows.data_ptr():
            increment_version(rows)  # autograd must detect that saved logits have changed
        ctx.backend, ctx.inv_scale, ctx.used = op.backend, inv_scale, False
        ctx.dtypes = [None if x is None else x.dtype for x in op[:3]]
        # scaled float16 gradients are rounded only after unscaling
        ctx.save_for_backward(*(cast(grads, ctx.dtypes) if inv_scale is None else grads))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x in outputs[1:] if x is not None])
        return outputs

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients in place by the upstream gradient (0-d)."""
        refuse_double_backward(torch.is_grad_enabled())
        if d_loss is None:
            return (None,) * 6
        if ctx.used:
            raise RuntimeError(
                "a second backward through the same loss is not possible: the first one scaled its "
                "stored gradients in place; compute the loss again, or add the losses before "
                "backward"
            )
        ctx.used, grads = True, ctx.saved_tensors
        factor = d_loss if ctx.inv_scale is None else d_loss * ctx.inv_scale
        if factor.device.type != "cpu" or factor.item() != 1:
            for grad in grads:
                if grad is not None:
                    ctx.backend.scale_(grad, factor)
        return *cast(grads, ctx.dtypes), None, None, None


class TokenLogprobs(Function):
    """Log-probs of `Operands`: logps [N], entropy [N], and MORE_OUTPUTS if `more`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        op: Operands,
        more: bool,
    ) -> tuple[Tensor, ...]:
        with without_autocast(op):
            logps, entropy, lse, *extra = linear.row_stats(op, more)
        ctx.save_for_backward(rows, weight, bias, lse, entropy)
        ctx.op = op._replace(rows=None, weight=None, bias=None)  # type: ignore[arg-type] # saved
        ctx.mark_non_differentiable(*extra)
        return logps, entropy, *extra

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor, d_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        *operands, lse, entropy = ctx.saved_tensors
        op = ctx.op._replace(rows=operands[0], weight=operands[1], bias=operands[2])
        columns = lse, entropy, d_logps.to(lse.dtype), d_entropy.to(lse.dtype)
        with without_autocast(op):
            grads = linear.row_grads(op, columns, NeedsGrad(*ctx.needs_input_grad[:3]))
        dtypes = [None if x is None else x.dtype for x in operands]
        return (*cast(grads, dtypes), None, None)


def without_autocast(op: Operands) -> AbstractContextManager[object]:
    """Autocast is applied already: `op.dtype`. Entering a context takes longer than the check."""
    device = op.rows.device.type
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


def loss_output(flat: Sequence[Any], shape: torch.Size) -> LossOutput:
    """Build a LossOutput from the outputs of `loss.fused_loss`; shape: that of the targets."""
    *scalars, logps, entropy, rollouts, demo_nll, totals, sketch, report = flat
    moments = None if rollouts is None else TokenMoments(rollouts, demo_nll, totals)
    filtered = None if report is None else FilterReport(*report)
    tokens = logps.view(shape), entropy.view(shape)
    return LossOutput._make((*scalars, *tokens, moments, sketch, filtered))


def cast(
    grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, ...]:
    """Convert each gradient to the dtype of its operand."""
    return tuple(
        [x if x is None or x.dtype is y else x.to(y) for x, y in zip(grads, dtypes, strict=True)]
    )
