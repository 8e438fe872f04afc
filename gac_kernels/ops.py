"""The calls as opaque registered operators, for torch.compile; eager code goes through autograd.py.

One operator serves both forms: `weight` is None at the logits level, where `rows` are the logits.
Checks that read values run inside, when the compiled code runs.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import backends, checks, linear
from .autograd import loss_output, refuse_double_backward
from .contract import LossOutput, LossSpec
from .reference import arithmetic
from .tokens import in_units

_SPEC_FIELDS = tuple(f.name for f in fields(LossSpec) if f.name != "demo_weight")
_SCALARS = 5  # loss, rollout_loss, demo_loss, kl, clip_fraction


def encode(spec: LossSpec) -> str:
    """A literal that `decode` reads back; f-strings, because Dynamo can trace them."""
    texts = [f"{name!r}:{getattr(spec, name)!r}" for name in _SPEC_FIELDS]
    return "{" + ",".join(texts) + f",'demo_weight':{spec.demo_weight.value!r}" + "}"


def decode(text: str) -> LossSpec:
    return LossSpec(**ast.literal_eval(text))


def number(value: float | Tensor | None) -> Tensor | None:
    """A Python number as a 0-d CPU tensor: one kind of argument for the schema."""
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64)


def _value(x: Any) -> Any:
    """The number back from a CPU tensor, so that no accelerator waits for a copy."""
    return x.item() if x is not None and x.device.type == "cpu" and x.dim() == 0 else x


def _padded(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 3 else rows[None]


def _chosen(
    rows: Tensor, weight: Tensor | None, targets: Tensor, cu_seqlens: Tensor | None, backend: str,
    compute: torch.dtype,
) -> ModuleType:  # fmt: skip
    """Check the values and choose the backend; shapes and dtypes were checked when compiling."""
    checks.values(targets, (rows.shape[-1:] if weight is None else weight.shape)[0], cu_seqlens)
    kind = compute if weight is None else arithmetic(compute)
    return backends.choose(backend, rows.device, kind)


@torch.library.custom_op(
    "gac_kernels::loss",
    mutates_args=(),
    schema=(
        "(Tensor rows, Tensor? weight, Tensor? bias, Tensor targets, Tensor advantages, "
        "Tensor is_demo, Tensor mu, Tensor? old_logps, Tensor? ref_logps, Tensor? cu_seqlens, "
        "Tensor? rollout_norm, Tensor? demo_norm, str spec, str backend, bool[] needs, "
        "ScalarType compute, int? chunk_bytes) -> (Tensor scalars, Tensor logps, Tensor entropy, "
        "Tensor rollouts, Tensor demo_nll, Tensor totals, Tensor unit, Tensor d_rows, "
        "Tensor d_weight, Tensor d_bias)"
    ),
)
def _loss(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, advantages: Tensor,
    is_demo: Tensor, mu: Tensor, old_logps: Tensor | None, ref_logps: Tensor | None,
    cu_seqlens: Tensor | None, rollout_norm: Tensor | None, demo_norm: Tensor | None, spec: str,
    backend: str, needs: list[bool], compute: torch.dtype, chunk_bytes: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The outputs of the loss, and the gradients of `rows`, `weight` and `bias` / `unit`."""
    options = decode(spec)
    batch = (
        targets, advantages, is_demo, _value(mu), old_logps, ref_logps, cu_seqlens, options,
        _value(rollout_norm), _value(demo_norm),
    )  # fmt: skip
    chosen = _chosen(rows, weight, targets, cu_seqlens, backend, compute)
    tokens = chosen.plan(*batch, arithmetic(compute))
    unit, shares = in_units(tokens, compute)
    if weight is None:
        out = torch.empty_like(rows) if needs[0] else None
        terms = chosen.row_loss(
            _padded(rows), shares, options, None if out is None else _padded(out)
        )
        grads = [rows.new_empty(0) if out is None else out, rows.new_empty(0), rows.new_empty(0)]
    else:
        with torch.autocast(rows.device.type, enabled=False):
            terms, sums = linear.fused_loss(
                rows.reshape(-1, rows.shape[-1]), linear.Head(weight, bias, compute, chunk_bytes),
                shares, options, chosen, linear.Needs(*needs),
            )  # fmt: skip
        dtypes = _gradient_dtypes(rows, weight, bias, compute)
        grads = [
            rows.new_empty(0) if g is None or x is None else g.to(d).view(x.shape)
            for g, x, d in zip(sums, (rows, weight, bias), dtypes, strict=True)
        ]
    *scalars, statistics = chosen.reduce(tokens, terms, moments=True)
    assert statistics is not None
    return (
        torch.stack(scalars), terms.logps.clone(), terms.entropy.clone(), statistics.rollouts,
        statistics.demo_nll, statistics.totals,
        torch.ones((), device=rows.device) if unit is None else unit, *grads,
    )  # fmt: skip


def _gradient_dtypes(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, compute: torch.dtype
) -> list[torch.dtype]:
    """float16 sums stay float32 until they are multiplied by their unit."""
    kept = torch.float32 if compute == torch.float16 else None
    return [rows.dtype, *(rows.dtype if x is None else kept or x.dtype for x in (weight, bias))]


@_loss.register_fake
def _(
    rows, weight, bias, targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens,
    rollout_norm, demo_norm, spec, backend, needs, compute, chunk_bytes,
):  # fmt: skip
    exact, tokens = arithmetic(compute), targets.numel()

    def new(*shape: int, dtype: torch.dtype = exact) -> Tensor:
        return rows.new_empty(shape, dtype=dtype)

    dtypes = _gradient_dtypes(rows, weight, bias, compute)
    grads = [
        new(*x.shape, dtype=dtype) if need and x is not None else rows.new_empty(0)
        for x, dtype, need in zip((rows, weight, bias), dtypes, needs, strict=True)
    ]
    f64 = torch.float64
    return (
        new(_SCALARS), new(tokens), new(tokens), new(7, dtype=f64),
        new(is_demo.shape[0], dtype=f64), new(6, dtype=f64), new(dtype=torch.float32), *grads,
    )  # fmt: skip


def _setup_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, weight, bias = inputs[:3]
    needs = inputs[14]
    ctx.needs = needs
    ctx.dtypes = [x.dtype if x is not None else None for x in (rows, weight, bias)]
    ctx.save_for_backward(*output[6:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_loss(ctx: Any, d_scalars: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    refuse_double_backward(torch.is_grad_enabled())
    if d_scalars is None:
        return (None,) * 17
    unit, *grads = ctx.saved_tensors
    factor = d_scalars[0] * unit
    scaled = [
        (g * factor).to(dtype) if need else None
        for g, need, dtype in zip(grads, ctx.needs, ctx.dtypes, strict=True)
    ]
    return (*scaled, *(None,) * 14)


_loss.register_autograd(_backward_loss, setup_context=_setup_loss)


def fused_loss(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, *batch: Any,
    spec: LossSpec, moments: bool, backend: str, compute: torch.dtype,
    chunk_bytes: int | None = None,
) -> LossOutput:  # fmt: skip
    """The compiled form of both fused losses. batch: advantages, is_demo, mu, old_logps,
    ref_logps, cu_seqlens, rollout_norm, demo_norm."""
    advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, rollout_norm, demo_norm = batch
    learning = torch.is_grad_enabled()
    needs = [x is not None and x.requires_grad and learning for x in (rows, weight, bias)]
    scalars, logps, entropy, *sums = torch.ops.gac_kernels.loss(
        rows, weight, bias, targets, advantages, is_demo, number(mu), old_logps, ref_logps,
        cu_seqlens, number(rollout_norm), number(demo_norm), encode(spec), backend, needs, compute,
        chunk_bytes,
    )[:6]  # fmt: skip
    loss, *parts = scalars.unbind()
    flat = (loss, *(x.detach() for x in parts), logps, entropy, *(sums if moments else (None,)))
    return loss_output(flat, targets.shape)


@torch.library.custom_op(
    "gac_kernels::logprobs",
    mutates_args=(),
    schema=(
        "(Tensor rows, Tensor? weight, Tensor? bias, Tensor targets, float temperature, "
        "str backend, ScalarType compute, int? chunk_bytes) -> (Tensor logps, Tensor entropy, "
        "Tensor lse)"
    ),
)
def _logprobs(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, temperature: float,
    backend: str, compute: torch.dtype, chunk_bytes: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    chosen = _chosen(rows, weight, targets, None, backend, compute)
    flat = targets.reshape(-1)
    if weight is None:
        return chosen.row_stats(_padded(rows), flat, temperature)
    with torch.autocast(rows.device.type, enabled=False):
        head = linear.Head(weight, bias, compute, chunk_bytes)
        stats = linear.token_stats(
            rows.reshape(-1, rows.shape[-1]), head, flat, temperature, chosen
        )
    logps, entropy, lse = (x.clone() for x in stats)
    return logps, entropy, lse


@_logprobs.register_fake
def _(rows, weight, bias, targets, temperature, backend, compute, chunk_bytes):
    tokens, exact = targets.numel(), arithmetic(compute)
    return tuple(rows.new_empty(tokens, dtype=exact) for _ in range(3))


@torch.library.custom_op(
    "gac_kernels::logprobs_backward",
    mutates_args=(),
    schema=(
        "(Tensor rows, Tensor? weight, Tensor? bias, Tensor targets, Tensor stats, "
        "float temperature, str backend, ScalarType compute, int? chunk_bytes, bool[] needs) -> "
        "(Tensor d_rows, Tensor d_weight, Tensor d_bias)"
    ),
)
def _logprobs_backward(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, stats: Tensor,
    temperature: float, backend: str, compute: torch.dtype, chunk_bytes: int | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    chosen = _chosen(rows, weight, targets, None, backend, compute)
    flat = targets.reshape(-1)
    if weight is None:
        out = torch.empty_like(rows)
        chosen.row_grads(_padded(rows), flat, *stats, temperature, _padded(out))
        return out, rows.new_empty(0), rows.new_empty(0)
    with torch.autocast(rows.device.type, enabled=False):
        sums = linear.token_grads(
            rows.reshape(-1, rows.shape[-1]), linear.Head(weight, bias, compute, chunk_bytes),
            flat, stats, temperature, chosen, linear.Needs(*needs),
        )  # fmt: skip
    d_rows, d_weight, d_bias = (
        rows.new_empty(0) if g is None or x is None else g.to(x.dtype).view(x.shape)
        for g, x in zip(sums, (rows, weight, bias), strict=True)
    )
    return d_rows, d_weight, d_bias


@_logprobs_backward.register_fake
def _(rows, weight, bias, targets, stats, temperature, backend, compute, chunk_bytes, needs):
    return tuple(
        x.new_empty(x.shape) if need and x is not None else rows.new_empty(0)
        for x, need in zip((rows, weight, bias), needs, strict=True)
    )


def _setup_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, entropy, lse = output
    ctx.save_for_backward(*inputs[:4], entropy, lse)
    ctx.settings = inputs[4:]
    ctx.needs = list(ctx.needs_input_grad[:3])
    ctx.mark_non_differentiable(lse)


def _backward_logprobs(ctx: Any, d_logps: Tensor, d_entropy: Tensor, _: Any) -> tuple[Any, ...]:
    refuse_double_backward(torch.is_grad_enabled())
    *inputs, entropy, lse = ctx.saved_tensors
    stats = torch.stack([lse, entropy, d_logps, d_entropy])
    grads = torch.ops.gac_kernels.logprobs_backward(*inputs, stats, *ctx.settings, ctx.needs)
    scaled = [g if need else None for g, need in zip(grads, ctx.needs, strict=True)]
    return (*scaled, *(None,) * 5)


_logprobs.register_autograd(_backward_logprobs, setup_context=_setup_logprobs)


def token_logprobs(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor,
    temperature: float, backend: str, compute: torch.dtype, chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The compiled form of both log-probability functions."""
    logps, entropy, _ = torch.ops.gac_kernels.logprobs(
        rows, weight, bias, targets, temperature, backend, compute, chunk_bytes
    )
    return logps.view(targets.shape), entropy.view(targets.shape)
