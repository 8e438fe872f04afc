"""The arguments of the public functions: checked, and gathered in `Operands` and `BatchInputs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import backends, checks, reference
from .contract import LossSpec, compute_dtype
from .filter import GradientFilter
from .inputs import BatchInputs, Operands, complete


def operands(
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    backend: str,
    chunk_bytes: int | None = None,
    gradient_filter: GradientFilter | None = None,
) -> Operands:
    """Check the arguments that all functions share, and choose the backend.

    The logit scale is folded into the temperature and the softcap. The dtype of a head's GEMMs is
    autocast's if autocast applies, otherwise that of the hidden states.
    """
    checks.temperature(temperature, targets)
    checks.positive("logit_scale", logit_scale)
    if softcap is not None:
        checks.positive("softcap", softcap)
    dtype = logits_dtype = rows.dtype
    if weight is not None:
        autocast = dtype != torch.float64 and torch.is_autocast_enabled(rows.device.type)
        checks.head(weight, bias, rows, autocast)
        checks.optional("gradient_filter", gradient_filter, GradientFilter)
        if chunk_bytes is not None and chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes!r}: use a number of bytes > 0, or None")
        dtype = torch.get_autocast_dtype(rows.device.type) if autocast else dtype
        logits_dtype = compute_dtype(dtype)
        rows = rows.reshape(-1, rows.shape[-1])
    elif rows.dim() == 2:
        rows = rows[None]
    temperatures, softcap = None, None if softcap is None else softcap / logit_scale
    if isinstance(temperature, Tensor):
        temperatures = reference.per_token(temperature, targets, compute_dtype(dtype)) / logit_scale
        temperature = logit_scale
    chosen: Any = backend
    if not torch.compiler.is_compiling():  # an operator chooses at run time
        chosen = backends.select_backend(backend, rows.device, logits_dtype)
    numbers = temperature / logit_scale, softcap
    flat = targets.reshape(-1)
    arguments = rows, weight, bias, flat, temperatures, *numbers, chosen, dtype, chunk_bytes
    return Operands(*arguments, filter=gradient_filter)


def batch_operands(
    rows: tuple[Tensor, Tensor | None, Tensor | None],  # with weight and bias
    roles: tuple[Tensor, Tensor | None, Tensor | None],  # targets, advantages, is_demo
    spec: LossSpec,
    logit_scale: float,
    *options: Any,  # of `operands`, from softcap on
    **batch: Any,  # the other arguments of `complete`
) -> tuple[Operands, BatchInputs, LossSpec]:
    """Check the arguments of a loss; the logit scale is folded into the results' temperatures."""
    checks.rows("logits" if rows[1] is None else "hidden", rows[0], roles[0])
    inputs = complete(*roles, spec=spec, **batch)
    checks.batch(rows[0], inputs, spec)
    op = operands(*rows, roles[0], spec.temperature, logit_scale, *options)
    if inputs.temperatures is not None and logit_scale != 1:  # in the dtype of the arithmetic
        temperatures = inputs.temperatures.to(op.targets.device, non_blocking=True)
        scaled = temperatures.to(compute_dtype(op.dtype)) / logit_scale
        inputs = inputs._replace(temperatures=scaled)
    if op.temperature != spec.temperature:
        spec = replace(spec, temperature=op.temperature)
    return op, inputs, spec
