"""The public functions as custom operators for torch.compile; eager code uses loss.py.

An operator takes fields of `Operands`, so that one serves both logits and a head. Checks that
read tensor values run inside it, at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import backends, checks, loss
from ._ops import add_op_namespace_prefix, ops
from .contract import LossOutput, LossSpec, TokenMoments, compute_dtype
from .loss import refuse_double_backward
from .tokens import BatchInputs, NeedsGrad, Operands, Upstream

# The arguments that all operators take first: fields of Operands, which also name the schema's.
_OPERANDS = {
    "rows": "Tensor",
    "weight": "Tensor?",
    "bias": "Tensor?",
    "targets": "Tensor",
    "temperatures": "Tensor?",
    "temperature": "float",
    "softcap": "float?",
    "backend": "str",
    "dtype": "ScalarType",
    "chunk_bytes": "int?",
}
_COUNT = len(_OPERANDS)
_SCHEMA = "(" + "".join(f"{kind} {name}, " for name, kind in _OPERANDS.items())
_KEYS = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)


def _pack(op: Operands) -> list[Any]:
    """The operands as arguments of an operator."""
    return [getattr(op, name) for name in _OPERANDS]


def _unpack(arguments: Sequence[Any]) -> Operands:
    """The operands of an operator, from its first arguments; the backend is still a name."""
    named: dict[str, Any] = dict(zip(_OPERANDS, arguments, strict=False))
    return Operands(**named, accum_dtype=compute_dtype(named["dtype"]))


def _running(arguments: Sequence[Any]) -> Operands:
    """The operands of a running operator, with its backend."""
    op = _unpack(arguments)
    dtype = op.dtype if op.weight is None else op.accum_dtype
    return replace(op, backend=backends.select_backend(op.backend, op.rows.device, dtype))


def _or_empty(grads: Sequence[Tensor | None], op: Operands, dtypes: Sequence[Any]) -> list[Tensor]:
    """The gradients in the shapes and dtypes of the operands; empty where there is none."""
    return [
        op.rows.new_empty(0) if g is None or x is None else g.to(dtype).view(x.shape)
        for g, x, dtype in zip(grads, op.leaves, dtypes, strict=True)
    ]


def _like_operands(op: Operands, needs: Sequence[bool], dtypes: Sequence[Any]) -> list[Tensor]:
    """The fake results of `_or_empty`."""
    return [
        x.new_empty(x.shape, dtype=dtype) if need and x is not None else op.rows.new_empty(0)
        for x, need, dtype in zip(op.leaves, needs, dtypes, strict=True)
    ]


def _dtypes(op: Operands, wide: torch.dtype | None = None) -> list[torch.dtype]:
    """Dtypes of the operands' gradients; `wide`: of those of weight and bias."""
    return [op.rows.dtype, *(wide or (op.rows if x is None else x).dtype for x in op.leaves[1:])]


def _saved_dtypes(op: Operands) -> list[torch.dtype]:
    """Gradients of float16 GEMMs are in float32 until they are unscaled."""
    return _dtypes(op, torch.float32 if op.dtype == torch.float16 else None)


@torch.library.custom_op(
    add_op_namespace_prefix("loss"),
    mutates_args=(),
    schema=(
        f"{_SCHEMA} Tensor shaped_targets, Tensor advantages, Tensor is_demo, Tensor mu, "
        "Tensor? old_logps, Tensor? ref_logps, Tensor? cu_seqlens, Tensor? rollout_norm, "
        "Tensor? demo_norm, Tensor? weights, Tensor? rollout_logps, Tensor? token_temperatures, "
        "Tensor? teacher_logps, Tensor? teacher_ids, float[] spec, bool[] needs) -> "
        "(Tensor scalars, Tensor logps, Tensor entropy, Tensor rollouts, Tensor demo_nll, "
        "Tensor totals, Tensor inv_scale, Tensor d_rows, Tensor d_weight, Tensor d_bias)"
    ),
)
def _loss(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute the loss's outputs, and the gradients of its operands divided by `inv_scale`."""
    *_, numbers, needs = arguments
    op, inputs = _running(arguments), BatchInputs(*arguments[_COUNT:-2])
    checks.values(inputs.targets, op.vocabulary, inputs)
    # numbers, so that no accelerator waits for a copy
    given = {name: getattr(inputs, name) for name in ("mu", "rollout_norm", "demo_norm")}
    constants = {k: x.item() if x is not None and x.is_cpu else x for k, x in given.items()}
    spec = replace(LossSpec.decode(numbers), temperature=op.temperature)
    eager = torch._C._ForceDispatchKeyGuard(*_KEYS)  # as in eager code, autograd may record
    with eager, torch.no_grad(), torch.autocast(op.rows.device.type, enabled=False):
        inputs, wanted = inputs._replace(**constants), NeedsGrad(*needs)
        values, grads, inv_scale = loss.fused_loss(op, inputs, spec, wanted)
    *scalars, logps, entropy, moments, teacher_loss = values[1]
    scalars.append(torch.zeros_like(scalars[0]) if teacher_loss is None else teacher_loss)
    return (
        torch.stack(scalars),
        *(
            logps.reshape(-1).clone(),
            entropy.reshape(-1).clone(),
            moments.rollouts,
            moments.demo_nll,
            moments.totals,
        ),
        op.rows.new_ones((), dtype=torch.float32) if inv_scale is None else inv_scale,
        *_or_empty(grads, op, _saved_dtypes(op)),
    )


@_loss.register_fake
def _(*arguments):
    op, inputs = _unpack(arguments), BatchInputs(*arguments[_COUNT:-2])
    accum_dtype, tokens, f64 = op.accum_dtype, inputs.targets.numel(), torch.float64

    def new(*shape: int, dtype: torch.dtype = accum_dtype) -> Tensor:
        return op.rows.new_empty(shape, dtype=dtype)

    moments = (new(7, dtype=f64), new(inputs.sequences, dtype=f64), new(6, dtype=f64))
    grads = _like_operands(op, arguments[-1], _saved_dtypes(op))
    # the first output: loss, rollout_loss, demo_loss, kl, clip_fraction, teacher_loss
    return new(6), new(tokens), new(tokens), *moments, new(dtype=torch.float32), *grads


def _setup_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs, ctx.arguments = inputs[-1], len(inputs)
    ctx.dtypes = _dtypes(_unpack(inputs))
    ctx.save_for_backward(*output[6:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_loss(ctx: Any, d_scalars: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    refuse_double_backward(torch.is_grad_enabled())
    if d_scalars is None:
        return (None,) * ctx.arguments
    inv_scale, *grads = ctx.saved_tensors
    factor = d_scalars[0] * inv_scale
    # Inductor multiplies in place: nothing else uses the saved gradients. Before an operator that
    # mutates them, and could leave them alone at 1, it would copy them.
    scaled = [
        (g * factor).to(dtype) if need else None
        for g, need, dtype in zip(grads, ctx.needs, ctx.dtypes, strict=True)
    ]
    return (*scaled, *(None,) * (ctx.arguments - 3))


_loss.register_autograd(_backward_loss, setup_context=_setup_loss)


def fused_loss(op: Operands, inputs: BatchInputs, spec: LossSpec, *, moments: bool) -> LossOutput:
    """Compute the fused loss from logits or from hidden states, under torch.compile."""
    inputs = inputs._replace(is_demo=inputs.all_roles(), advantages=inputs.all_advantages())
    options: Any = {"dtype": torch.float64, "device": "cpu"}
    tensors = [  # the schema has a single type for numbers and tensors
        torch.full((), x, **options) if isinstance(x, (int, float)) else x for x in inputs
    ]
    outputs = ops.loss(*_pack(op), *tensors, spec.encode(), list(op.needs))
    scalars, logps, entropy, *sums = outputs[:6]
    total, *parts = scalars.unbind()
    rollout_loss, demo_loss, kl, clip_fraction, teacher_loss = (x.detach() for x in parts)
    return LossOutput(
        loss=total,
        rollout_loss=rollout_loss,
        demo_loss=demo_loss,
        kl=kl,
        clip_fraction=clip_fraction,
        logps=logps,
        entropy=entropy,
        moments=TokenMoments(*sums) if moments else None,
        teacher_loss=None if inputs.teacher_logps is None else teacher_loss,
    ).shaped(inputs.targets.shape)


@torch.library.custom_op(
    add_op_namespace_prefix("logprobs"),
    mutates_args=(),
    schema=f"{_SCHEMA} bool more_outputs) -> Tensor",
)
def _logprobs(*arguments: Any) -> Tensor:
    """Compute logps, entropy and lse, and MORE_OUTPUTS if `more_outputs`: [3 or 6, N]."""
    op = _running(arguments)
    checks.values(op.targets, op.vocabulary)
    checks.in_range("temperature", op.temperatures, op.targets)
    with torch.autocast(op.rows.device.type, enabled=False):
        return torch.stack(tuple(loss.row_stats(op, more_outputs=arguments[-1])))


@_logprobs.register_fake
def _(*arguments):
    op = _unpack(arguments)
    rows = 6 if arguments[-1] else 3
    return op.rows.new_empty(rows, op.targets.numel(), dtype=op.accum_dtype)


@torch.library.custom_op(
    add_op_namespace_prefix("logprobs_backward"),
    mutates_args=(),
    schema=(
        f"{_SCHEMA} Tensor columns, bool[] needs) "
        "-> (Tensor d_rows, Tensor d_weight, Tensor d_bias)"
    ),
)
def _logprobs_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    op, (columns, needs) = _running(arguments), arguments[_COUNT:]
    with torch.autocast(op.rows.device.type, enabled=False):
        grads = loss.row_grads(op, Upstream(*columns.unbind()), NeedsGrad(*needs))
    d_rows, d_weight, d_bias = _or_empty(grads, op, _dtypes(op))
    return d_rows, d_weight, d_bias


@_logprobs_backward.register_fake
def _(*arguments):
    op = _unpack(arguments)
    return tuple(_like_operands(op, arguments[-1], _dtypes(op)))


def _setup_logprobs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5], output)
    ctx.settings, ctx.needs = inputs[5:_COUNT], list(ctx.needs_input_grad[:3])


def _backward_logprobs(ctx: Any, d_stats: Tensor) -> tuple[Any, ...]:
    refuse_double_backward(torch.is_grad_enabled())
    *inputs, stats = ctx.saved_tensors
    # lse, entropy, and the upstream gradients of logps and entropy
    columns = torch.stack([stats[2], stats[1], d_stats[0], d_stats[1]])
    grads = ops.logprobs_backward(*inputs, *ctx.settings, columns, ctx.needs)
    needed = [g if need else None for g, need in zip(grads, ctx.needs, strict=True)]
    return (*needed, *(None,) * (_COUNT - 2))


_logprobs.register_autograd(_backward_logprobs, setup_context=_setup_logprobs)


def token_logprobs(op: Operands, *, more_outputs: bool) -> tuple[Tensor, ...]:
    """Compute log-probabilities from logits or from hidden states, under torch.compile.

    Also returns the entropy and, if `more_outputs`, MORE_OUTPUTS; each is [N].
    """
    stats = ops.logprobs(*_pack(op), more_outputs).unbind()
    logps, entropy, _, *extra = (x.clone() for x in stats)
    return logps, entropy, *(x.detach() for x in extra)
