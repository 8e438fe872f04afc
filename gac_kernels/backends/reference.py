"""Row functions in plain PyTorch: runs on every device and in every float dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..contract import LossSpec
from ..tokens import Tokens, TokenTerms, plan
from ..tokens import finish as reduce

__all__ = ["plan", "reduce", "row_grads", "row_loss", "row_stats", "scale_", "unavailable"]


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def row_stats(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logps, entropy, lse = _stats(_live_rows(logits, targets), targets, temperature)
    return _fill(targets, logps), _fill(targets, entropy), _fill(targets, lse)


def row_grads(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor,
    temperature: float,
    out: Tensor,
) -> None:
    live = _live(targets)
    rows = _live_rows(logits, targets)
    z = rows / temperature - lse[live, None]
    p = z.exp()
    grad = -p * d_logps[live, None]
    grad[torch.arange(len(live), device=grad.device), targets[live]] += d_logps[live]
    pull = p * (z.masked_fill(z == -torch.inf, 0) + entropy[live, None])
    grad -= pull * d_entropy[live, None]
    grad[(d_logps[live] == 0) & (d_entropy[live] == 0)] = 0
    _write(out, live, grad / temperature)


def row_loss(logits: Tensor, tokens: Tokens, spec: LossSpec, out: Tensor | None) -> TokenTerms:
    with torch.enable_grad():
        logps, entropy, lse = row_stats(logits, tokens.targets, spec.temperature)
        leaves = logps.requires_grad_(), entropy.requires_grad_()
        terms = reference.token_terms(*leaves, tokens, spec)
        total = (tokens.scale * terms.loss).sum()
    if out is not None:
        d_logps, d_entropy = torch.autograd.grad(total, leaves, materialize_grads=True)
        row_grads(
            logits, tokens.targets, lse, entropy.detach(), d_logps, d_entropy,
            spec.temperature, out,
        )  # fmt: skip
    return TokenTerms(*(x.detach() for x in terms))


def scale_(tensor: Tensor, factor: Tensor) -> None:
    tensor.mul_(factor)


def _live(targets: Tensor) -> Tensor:
    return (targets != -100).nonzero().squeeze(1)


def _live_rows(logits: Tensor, targets: Tensor) -> Tensor:
    live, width = _live(targets), logits.shape[1]
    rows = logits[live // width, live % width] if width else logits.reshape(0, logits.shape[-1])
    return rows.to(reference.arithmetic(logits.dtype))


def _stats(rows: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    z = rows / temperature
    lse = z.logsumexp(-1)
    lse = torch.where(lse == torch.inf, torch.nan, lse)
    logps = z.gather(-1, targets[_live(targets), None]).squeeze(-1) - lse
    p = (z - lse[:, None]).exp()
    return logps, lse - (p * z.masked_fill(z == -torch.inf, 0)).sum(-1), lse


def _fill(targets: Tensor, values: Tensor) -> Tensor:
    out = torch.zeros(targets.shape, dtype=values.dtype, device=values.device)
    return out.index_copy_(0, _live(targets), values)


def _write(out: Tensor, live: Tensor, grad: Tensor) -> None:
    out.zero_()
    width = out.shape[1]
    if width:
        out[live // width, live % width] = grad.to(out.dtype)
