"""The public functions as custom operators for torch.compile; eager code uses autograd.py.

One operator serves both forms: `rows` are the logits if `weight` is None, otherwise the hidden
states. Checks that read tensor values run inside the operator, at run time.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import backends, checks, linear
from ._ops import add_op_namespace_prefix, ops
from .autograd import loss_output, refuse_double_backward
from .contract import LossOutput, LossSpec
from .inputs import BatchInputs
from .linear import NeedsGrad, Scaling
from .passes import logits_loss
from .projection import GemmOptions, Projection
from .reference import compute_dtype
from .scalars import decode, encode
from .sketch import HeadSketch
from .tokens import with_factors

_SCALARS = 5  # loss, rollout_loss, demo_loss, kl, clip_fraction
_INPUTS = len(BatchInputs._fields)
_ARGUMENTS = 3 + _INPUTS + 9  # of the operator `loss`: operands, inputs, and settings
_SCALAR_INPUTS = ("mu", "rollout_norm", "demo_norm")  # inputs: numbers or 0-d tensors
Operands = tuple[Tensor, Tensor | None, Tensor | None]  # rows, weight, bias


def _to_tensors(inputs: BatchInputs) -> BatchInputs:
    """Convert Python numbers to 0-d CPU tensors, so that the schema has a single argument type."""

    def tensor(value: Any) -> Any:
        if value is None or isinstance(value, Tensor):
            return value
        return torch.full((), value, dtype=torch.float64, device="cpu")

    scalars = {name: tensor(getattr(inputs, name)) for name in _SCALAR_INPUTS}
    return inputs._replace(**scalars)


def _to_numbers(inputs: BatchInputs) -> BatchInputs:
    """Convert 0-d CPU tensors back to numbers, so that no accelerator waits for a copy."""

    def number(x: Any) -> Any:
        return x.item() if x is not None and x.device.type == "cpu" and x.dim() == 0 else x

    scalars = {name: number(getattr(inputs, name)) for name in _SCALAR_INPUTS}
    return inputs._replace(**scalars)


def _to_padded(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 3 else rows[None]


def _choose_backend(
    rows: Tensor, weight: Tensor | None, backend: str, dtype: torch.dtype
) -> ModuleType:
    logits_dtype = dtype if weight is None else compute_dtype(dtype)
    return backends.choose(backend, rows.device, logits_dtype)


def _check_values(
    rows: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    cu_seqlens: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Check tensor values, known only at run time; shapes and dtypes are already checked."""
    vocabulary = (rows.shape[-1:] if weight is None else weight.shape)[0]
    checks.values(targets, vocabulary, cu_seqlens, weights)


@torch.library.custom_op(
    add_op_namespace_prefix("loss"),
    mutates_args=(),
    schema=(
        "(Tensor rows, Tensor? weight, Tensor? bias, Tensor targets, Tensor advantages, "
        "Tensor is_demo, Tensor mu, Tensor? old_logps, Tensor? ref_logps, Tensor? cu_seqlens, "
        "Tensor? rollout_norm, Tensor? demo_norm, Tensor? weights, Tensor? rollout_logps, "
        "str spec, float[] numbers, float temperature, float? softcap, str backend, bool[] needs, "
        "ScalarType dtype, int? chunk_bytes, int[] sketch) -> (Tensor scalars, Tensor logps, "
        "Tensor entropy, Tensor rollouts, Tensor demo_nll, Tensor totals, Tensor sketch, "
        "Tensor inv_scale, Tensor d_rows, Tensor d_weight, Tensor d_bias)"
    ),
)
def _loss(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    """Compute the loss's outputs, and the gradients of its operands divided by `inv_scale`."""
    inputs = _to_numbers(BatchInputs(*others[:_INPUTS]))
    *encoded, temperature, softcap, backend, needs, dtype, chunk_bytes, sketch_args = others[
        _INPUTS:
    ]
    options = GemmOptions(dtype, chunk_bytes)
    spec = replace(decode(*encoded), temperature=temperature)
    _check_values(rows, weight, inputs.targets, inputs.cu_seqlens, inputs.weights)
    chosen = _choose_backend(rows, weight, backend, options.dtype)
    tokens = chosen.plan(inputs, spec, compute_dtype(options.dtype))
    tokens = with_factors(tokens, inputs, spec)
    sketches = rows.new_empty(0)
    if weight is None:
        out = rows.new_empty(rows.shape) if needs[0] else None  # strides as in the fake
        padded_out = None if out is None else _to_padded(out)
        settings = tokens, spec, chosen, padded_out, softcap
        terms, inv_scale = logits_loss(_to_padded(rows), *settings)
        grads = [rows.new_empty(0) if out is None else out, rows.new_empty(0), rows.new_empty(0)]
    else:
        hidden = rows.reshape(-1, rows.shape[-1])
        sketch = HeadSketch(*sketch_args) if sketch_args else None
        with torch.autocast(rows.device.type, enabled=False):
            projection = Projection(weight, bias, options)
            terms, sums, sketched, inv_scale = linear.fused_loss(
                hidden, projection, tokens, spec, chosen, NeedsGrad(*needs), sketch, softcap
            )
        sketches = sketches if sketched is None else sketched
        dtypes = _gradient_dtypes(rows, weight, bias, options.dtype)
        grads = [
            rows.new_empty(0) if g is None or x is None else g.to(d).view(x.shape)
            for g, x, d in zip(sums, (rows, weight, bias), dtypes, strict=True)
        ]
    *scalars, moments = chosen.reduce(tokens, terms, moments=True)
    assert moments is not None
    return (
        torch.stack(scalars),
        terms.logps.clone(),
        terms.entropy.clone(),
        moments.rollouts,
        moments.demo_nll,
        moments.totals,
        sketches,
        torch.ones((), device=rows.device) if inv_scale is None else inv_scale,
        *grads,
    )


def _gradient_dtypes(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> list[torch.dtype]:
    """Dtypes of the gradients; for float16 GEMMs, float32 until the gradients are unscaled."""
    wide = torch.float32 if dtype == torch.float16 else None
    return [rows.dtype, *(rows.dtype if x is None else wide or x.dtype for x in (weight, bias))]


@_loss.register_fake
def _(rows, weight, bias, *others):
    inputs = BatchInputs(*others[:_INPUTS])
    *_, needs, gemm_dtype, _, sketch_args = others[_INPUTS:]
    accum_dtype, tokens, f64 = compute_dtype(gemm_dtype), inputs.targets.numel(), torch.float64

    def new(*shape: int, dtype: torch.dtype = accum_dtype) -> Tensor:
        return rows.new_empty(shape, dtype=dtype)

    dtypes = _gradient_dtypes(rows, weight, bias, gemm_dtype)
    grads = [
        new(*x.shape, dtype=dtype) if need and x is not None else rows.new_empty(0)
        for x, dtype, need in zip((rows, weight, bias), dtypes, needs, strict=True)
    ]
    sequences = inputs.sequences
    moments = (new(7, dtype=f64), new(sequences, dtype=f64), new(6, dtype=f64))
    sketch = new(sequences, sketch_args[0], sketch_args[0]) if sketch_args else rows.new_empty(0)
    scalars = new(_SCALARS), new(tokens), new(tokens)
    return *scalars, *moments, sketch, new(dtype=torch.float32), *grads


def _setup_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, weight, bias = inputs[:3]
    ctx.needs = inputs[-4]
    ctx.dtypes = [x.dtype if x is not None else None for x in (rows, weight, bias)]
    ctx.save_for_backward(*output[7:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_loss(ctx: Any, d_scalars: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    refuse_double_backward(torch.is_grad_enabled())
    if d_scalars is None:
        return (None,) * _ARGUMENTS
    inv_scale, *grads = ctx.saved_tensors
    factor = d_scalars[0] * inv_scale
    scaled = [
        (g * factor).to(dtype) if need else None
        for g, need, dtype in zip(grads, ctx.needs, ctx.dtypes, strict=True)
    ]
    return (*scaled, *(None,) * (_ARGUMENTS - 3))


_loss.register_autograd(_backward_loss, setup_context=_setup_loss)


def fused_loss(
    operands: Operands,
    inputs: BatchInputs,
    spec: LossSpec,
    moments: bool,
    scaling: Scaling,
    backend: str,
    options: GemmOptions,
    sketch: HeadSketch | None = None,
) -> LossOutput:
    """Compute the fused loss from logits or from hidden states, under torch.compile."""
    outputs = ops.loss(
        *operands,
        *_to_tensors(inputs),
        *encode(spec),
        *scaling,
        backend,
        list(NeedsGrad.of(*operands)),
        *options[:2],
        [] if sketch is None else [sketch.size, sketch.seed],
    )
    scalars, logps, entropy, *sums, sketches = outputs[:7]
    loss, *parts = scalars.unbind()
    constants = (x.detach() for x in parts)
    flat = loss, *constants, logps, entropy, *(sums if moments else (None,) * 3)
    flat = *flat, None if sketch is None else sketches
    return loss_output(flat, inputs.targets.shape)


@torch.library.custom_op(
    add_op_namespace_prefix("logprobs"),
    mutates_args=(),
    schema=(
        "(Tensor rows, Tensor? weight, Tensor? bias, Tensor targets, float temperature, "
        "float? softcap, str backend, ScalarType dtype, int? chunk_bytes, bool more) -> Tensor"
    ),
)
def _logprobs(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, *settings: Any
) -> Tensor:
    """Compute logps, entropy and lse, and MORE_OUTPUTS if `more`: [3 or 6, N]."""
    temperature, softcap, backend, *gemms, more = settings
    scaling, options = Scaling(temperature, softcap), GemmOptions(*gemms)
    _check_values(rows, weight, targets)
    chosen, flat = _choose_backend(rows, weight, backend, options.dtype), targets.reshape(-1)
    if weight is None:
        return torch.stack(chosen.row_stats(_to_padded(rows), flat, *scaling, more))
    hidden = rows.reshape(-1, rows.shape[-1])
    with torch.autocast(rows.device.type, enabled=False):
        projection = Projection(weight, bias, options)
        return linear.token_stats(hidden, projection, flat, scaling, chosen, more)


@_logprobs.register_fake
def _(rows, weight, bias, targets, temperature, softcap, backend, dtype, chunk_bytes, more):
    return rows.new_empty(6 if more else 3, targets.numel(), dtype=compute_dtype(dtype))


@torch.library.custom_op(
    add_op_namespace_prefix("logprobs_backward"),
    mutates_args=(),
    schema=(
        "(Tensor rows, Tensor? weight, Tensor? bias, Tensor targets, Tensor stats, "
        "float temperature, float? softcap, str backend, ScalarType dtype, int? chunk_bytes, "
        "bool[] needs) -> (Tensor d_rows, Tensor d_weight, Tensor d_bias)"
    ),
)
def _logprobs_backward(
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    stats: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    temperature, softcap, backend, *gemms, needs = settings
    options = GemmOptions(*gemms)
    chosen, flat = _choose_backend(rows, weight, backend, options.dtype), targets.reshape(-1)
    if weight is None:
        out = rows.new_empty(rows.shape)
        chosen.row_grads(_to_padded(rows), flat, *stats, temperature, _to_padded(out), softcap)
        return out, rows.new_empty(0), rows.new_empty(0)
    hidden = rows.reshape(-1, rows.shape[-1])
    with torch.autocast(rows.device.type, enabled=False):
        projection, scaling = Projection(weight, bias, options), Scaling(temperature, softcap)
        sums = linear.token_grads(
            hidden, projection, flat, stats, scaling, chosen, NeedsGrad(*needs)
        )
    d_rows, d_weight, d_bias = (
        rows.new_empty(0) if g is None or x is None else g.to(x.dtype).view(x.shape)
        for g, x in zip(sums, (rows, weight, bias), strict=True)
    )
    return d_rows, d_weight, d_bias


@_logprobs_backward.register_fake
def _(rows, weight, bias, targets, stats, temperature, softcap, backend, dtype, chunk_bytes, needs):
    return tuple(
        x.new_empty(x.shape) if need and x is not None else rows.new_empty(0)
        for x, need in zip((rows, weight, bias), needs, strict=True)
    )


def _setup_logprobs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4], output)
    ctx.settings = inputs[4:9]
    ctx.needs = list(ctx.needs_input_grad[:3])


def _backward_logprobs(ctx: Any, d_stats: Tensor) -> tuple[Any, ...]:
    refuse_double_backward(torch.is_grad_enabled())
    *inputs, stats = ctx.saved_tensors
    # lse, entropy, and the upstream gradients of logps and entropy
    columns = torch.stack([stats[2], stats[1], d_stats[0], d_stats[1]])
    grads = ops.logprobs_backward(*inputs, columns, *ctx.settings, ctx.needs)
    needed = [g if need else None for g, need in zip(grads, ctx.needs, strict=True)]
    return (*needed, *(None,) * 7)


_logprobs.register_autograd(_backward_logprobs, setup_context=_setup_logprobs)


def token_logprobs(
    operands: Operands,
    targets: Tensor,
    scaling: Scaling,
    more: bool,
    backend: str,
    options: GemmOptions,
) -> tuple[Tensor, ...]:
    """Compute log-probabilities from logits or from hidden states, under torch.compile.

    Also returns the entropy and, if `more`, MORE_OUTPUTS; each is [N].
    """
    stats = ops.logprobs(*operands, targets, *scaling, backend, *options[:2], more)
    logps, entropy, _, *extra = stats.unbind()
    return logps, entropy, *(x.detach() for x in extra)
