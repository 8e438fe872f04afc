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
from .contract import LossOutput
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
        if weight is None and grads[0] is not None and grads[0].data_ptr() == rows.data_ptr():
            increment_version(rows)  # autograd must detect that saved logits have changed
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
            logps, entropy, lse, *extra = linear.row_stats(op, more_outputs)
        ctx.save_for_backward(*op[:3], lse, entropy)
        ctx.settings = op[3:]
        ctx.mark_non_differentiable(*extra)
        return logps, entropy, *extra

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor, d_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        *operands, lse, entropy = ctx.saved_tensors
        op = Operands(*operands, *ctx.settings)
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


def loss_output(total: Tensor, others: Sequence[Any], shape: torch.Size) -> LossOutput:
    """Build a LossOutput from the outputs of `loss.fused_loss`; shape: that of the targets."""
    *scalars, logps, entropy, moments, sketch, report = others
    filtered = None if report is None else FilterReport(*report)
    tokens = logps.view(shape), entropy.view(shape)
    return LossOutput._make((total, *scalars, *tokens, moments, sketch, filtered))


def cast(
    grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, ...]:
    """Convert each gradient to the dtype of its operand."""
    return tuple(
        [x if x is None or x.dtype is y else x.to(y) for x, y in zip(grads, dtypes, strict=True)]
    )
