"""The autograd functions of the public calls.

The losses make their gradients in the forward: every coefficient is known by then, so the rows are
read while they are warm and the backward only scales. The log-probabilities cannot know their
upstream gradient and recompute the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from . import linear
from .contract import LossOutput, LossSpec, TokenMoments
from .tokens import Summary, Tokens, TokenTerms, in_units


def refuse_double_backward(grad_enabled: bool) -> None:
    """Called in every backward: with create_graph=True the result would be silently constant."""
    if grad_enabled:
        raise RuntimeError(
            "the fused functions are differentiable once: for a double backward "
            "(create_graph=True) use the function of the same name in gac_kernels.reference"
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
        ctx.unit, shares = in_units(tokens, logits.dtype)
        terms = backend.row_loss(logits, shares, spec, out)
        if out is not None:
            if out.data_ptr() == logits.data_ptr():
                increment_version(logits)  # whoever saved the logits must notice
            ctx.save_for_backward(out)
            ctx.backend = backend
        return _outputs(ctx, backend.reduce(tokens, terms, moments), terms)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        if d_loss is None:
            return (None,) * 6
        (grad,) = _scaled(ctx, d_loss)
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


class FusedLinearLoss(Function):
    """hidden [N, H], weight [V, H], bias [V] -> the same outputs as `FusedLoss`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tokens,
        spec: LossSpec,
        backend: ModuleType,
        moments: bool,
        needs: linear.Needs,
        compute: torch.dtype,
        chunk_bytes: int | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.unit, shares = in_units(tokens, compute)
        with torch.autocast(hidden.device.type, enabled=False):
            head = linear.Head(weight, bias, compute, chunk_bytes)
            terms, sums = linear.fused_loss(hidden, head, shares, spec, backend, needs)
        ctx.backend = backend
        ctx.dtypes = tuple(x if x is None else x.dtype for x in (hidden, weight, bias))
        # with a unit they are rounded once it is multiplied back
        ctx.save_for_backward(*(_cast(sums, ctx.dtypes) if ctx.unit is None else sums))
        return _outputs(ctx, backend.reduce(tokens, terms, moments), terms)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        if d_loss is None:
            return (None,) * 10
        return (*_cast(_scaled(ctx, d_loss), ctx.dtypes), *(None,) * 7)


class LinearLogprobs(Function):
    """hidden [N, H], weight [V, H], bias [V], targets [N] -> logps [N], entropy [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        backend: ModuleType,
        compute: torch.dtype,
        chunk_bytes: int | None,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            head = linear.Head(weight, bias, compute, chunk_bytes)
            logps, entropy, lse = linear.token_stats(hidden, head, targets, temperature, backend)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.settings = temperature, backend, compute, chunk_bytes
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        temperature, backend, compute, chunk_bytes = ctx.settings
        stats = torch.stack([lse, entropy, d_logps.to(lse.dtype), d_entropy.to(lse.dtype)])
        with torch.autocast(hidden.device.type, enabled=False):
            head = linear.Head(weight, bias, compute, chunk_bytes)
            grads = linear.token_grads(
                hidden, head, targets, stats, temperature, backend,
                linear.Needs(*ctx.needs_input_grad[:3]),
            )  # fmt: skip
        dtypes = tuple(x if x is None else x.dtype for x in (hidden, weight, bias))
        return (*_cast(grads, dtypes), *(None,) * 5)


def _outputs(ctx: Any, summary: Summary, terms: TokenTerms) -> tuple[Tensor | None, ...]:
    """The flat outputs of a loss function; all but the first are constants to autograd."""
    *scalars, statistics = summary
    flat = (
        (statistics.rollouts, statistics.demo_nll, statistics.totals)
        if statistics
        else (None, None, None)
    )
    detached = [x for x in (*scalars[1:], terms.logps, terms.entropy, *flat) if x is not None]
    ctx.mark_non_differentiable(*detached)
    ctx.set_materialize_grads(False)
    return (*scalars, terms.logps, terms.entropy, *flat)


def _scaled(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
    """The saved gradients times the upstream one (0-d), in their own storage."""
    grads = ctx.saved_tensors
    factor = d_loss if ctx.unit is None else d_loss * ctx.unit
    if factor.device.type != "cpu" or factor.item() != 1:
        for grad in grads:
            if grad is not None:
                ctx.backend.scale_(grad, factor)
                increment_version(grad)  # a second backward would scale twice: autograd refuses
    return grads


def _cast(
    grads: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype | None, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(
        None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)
    )


def loss_output(flat: Sequence[Any], shape: torch.Size) -> LossOutput:
    """What `FusedLoss` returned, in the shapes of the contract."""
    loss, rollout_loss, demo_loss, kl, clip_fraction, logps, entropy, *sums = flat
    return LossOutput(
        loss, rollout_loss, demo_loss, kl, clip_fraction, logps.view(shape), entropy.view(shape),
        None if sums[0] is None else TokenMoments(*sums),
    )  # fmt: skip
