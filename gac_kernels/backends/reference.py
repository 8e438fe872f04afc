"""Row functions in plain PyTorch, for every device and float dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..contract import IGNORE, LossSpec, compute_dtype
from ..filter import RowMarks, mark_rows
from ..sketch import RowSketch, row_buckets
from ..tokens import Tokens, TokenTerms, plan, reduce

__all__ = ["plan", "reduce", "row_grads", "row_loss", "row_stats", "scale_", "unavailable"]


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def row_stats(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    softcap: float | None = None,
    more_outputs: bool = False,
) -> tuple[Tensor, ...]:
    return reference.row_stats(logits.flatten(0, 1), targets, temperature, softcap, more_outputs)


def row_grads(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor,
    temperature: float | Tensor,
    out: Tensor,
    softcap: float | None = None,
    sketch: RowSketch | None = None,
    whole_row: bool = True,
    marks: RowMarks | None = None,
) -> None:
    live = (targets != IGNORE).nonzero().squeeze(1)
    rows = logits.flatten(0, 1).index_select(0, live).to(compute_dtype(logits.dtype))
    tau = temperature[live, None] if isinstance(temperature, Tensor) else temperature
    capped = reference.scale_logits(rows, 1.0, softcap)
    z = capped / tau - lse[live, None]
    p = z.exp()
    grad = -p * d_logps[live, None]
    inside = (targets[live] >= 0) & (targets[live] < grad.shape[1])
    target = torch.where(inside, targets[live], 0)[:, None]
    grad.scatter_add_(1, target, torch.where(inside, d_logps[live], 0)[:, None])
    entropy_part = p * (z.masked_fill(z == -torch.inf, 0) + entropy[live, None])
    grad -= entropy_part * d_entropy[live, None]
    if softcap is not None:
        grad *= 1 - (capped / softcap).masked_fill(capped.isinf(), 1) ** 2
    grad[(d_logps[live] == 0) & (d_entropy[live] == 0)] = 0
    out.zero_()
    width = out.shape[1]
    if width:
        out[live // width, live % width] = (grad / tau).to(out.dtype)
    if sketch is not None:
        row_buckets(out, sketch)
    if marks is not None:
        mark_rows(out, targets, (d_logps.abs() + d_entropy.abs()) / temperature, marks)


def row_loss(
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    sketch: RowSketch | None = None,
    softcap: float | None = None,
    marks: RowMarks | None = None,
) -> TokenTerms:
    calls, notes = (row_stats, row_grads), {"sketch": sketch, "marks": marks}
    return loss_in_two_calls(*calls, logits, tokens, spec, out, softcap, notes)


def loss_in_two_calls(
    row_stats: Callable[..., tuple[Tensor, ...]],
    row_grads: Callable[..., None],
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    softcap: float | None,
    notes: dict[str, Any],  # further arguments of `row_grads`
) -> TokenTerms:
    """`row_loss` by the other two row functions of a backend."""
    temperature = spec.temperature if tokens.temperature is None else tokens.temperature
    logps, entropy, lse = row_stats(logits, tokens.targets, temperature, softcap)
    terms, upstream = reference.token_gradients(logps, entropy, tokens, spec, out is not None)
    if out is not None and upstream is not None:
        columns = lse, entropy, upstream[0], upstream[1]
        row_grads(logits, tokens.targets, *columns, temperature, out, softcap, **notes)
    return terms


def scale_(tensor: Tensor, factor: Tensor) -> None:
    tensor.mul_(factor)
