"""The autograd functions of the logits-level calls.

`FusedLoss` makes the gradient in its forward: every coefficient is known by then, so the rows are
read while they are warm and the backward only scales. `TokenLogprobs` cannot know its upstream
gradient and recomputes the probabilities.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from .contract import LossOutput, LossSpec, TokenMoments
from .tokens import Tokens, finish


def refuse_double_backward(grad_enabled: bool) -> None:
    """Called in every backward: with create_graph=True the result would be silently constant."""
    if grad_enabled:
        raise RuntimeError(
            "the fused loss is differentiable once: double backward (create_graph=True) needs "
            "backend='reference'"
        )


class FusedLoss(Function):
    """logits [B, T, V] -> the scalars of `tokens.Summary`, logps, entropy and three moments."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tokens,
        spec: LossSpec,
        backend: ModuleType,
        moments: bool,
        out: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        terms = backend.row_loss(logits, tokens, spec, out)
        *scalars, statistics = finish(tokens, terms, moments)
        if out is not None:
            if out.data_ptr() == logits.data_ptr():
                increment_version(logits)  # whoever saved the logits must notice
            ctx.save_for_backward(out)
            ctx.backend = backend
        flat = (
            (statistics.rollouts, statistics.demo_nll, statistics.totals)
            if statistics
            else (None, None, None)
        )
        detached = [x for x in (*scalars[1:], terms.logps, terms.entropy, *flat) if x is not None]
        ctx.mark_non_differentiable(*detached)
        ctx.set_materialize_grads(False)
        return (*scalars, terms.logps, terms.entropy, *flat)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        if d_loss is None:
            return (None,) * 6
        (grad,) = ctx.saved_tensors
        if d_loss.device.type != "cpu" or d_loss != 1:
            ctx.backend.scale_(grad, d_loss)
            increment_version(grad)  # a second backward would scale twice: let autograd refuse
        return (grad, None, None, None, None, None)


class TokenLogprobs(Function):
    """logits [B, T, V], targets [N] -> logps [N], entropy [N]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, backend: ModuleType
    ) -> tuple[Tensor, Tensor]:
        logps, entropy, lse = backend.row_stats(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.temperature, ctx.backend = temperature, backend
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        logits, targets, lse, entropy = ctx.saved_tensors
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        ctx.backend.row_grads(
            logits, targets, lse, entropy, d_logps.contiguous(), d_entropy.contiguous(),
            ctx.temperature, out,
        )  # fmt: skip
        return out, None, None, None


def loss_output(flat: tuple[Tensor | None, ...], shape: torch.Size) -> LossOutput:
    """What `FusedLoss` returned, in the shapes of the contract."""
    *scalars, logps, entropy, rollouts, demo_nll, totals = flat
    statistics = None if rollouts is None else TokenMoments(rollouts, demo_nll, totals)
    return LossOutput(*scalars, logps.view(shape), entropy.view(shape), statistics)
