"""Launches of the kernels of size N and S: `plan` and `reduce` in two each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import DemoWeight, LossSpec, TokenMoments
from ..tokens import Summary, Tokens, TokenTerms
from . import reference
from .triton_batch import SUMS, lengths_kernel, merge_kernel, sequence_kernel, tokens_kernel
from .triton_launch import Launch

BLOCK = 512
_WARPS = 4
_SHARED = 16  # programs that share a long sequence of `tokens_kernel`, at most


def plan(
    targets: Tensor,
    advantages: Tensor,
    is_demo: Tensor,
    mu: float | Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: LossSpec,
    rollout_norm: float | Tensor | None,
    demo_norm: float | Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tokens:
    device, n, sequences = targets.device, targets.numel(), is_demo.numel()
    if n == 0:
        return reference.plan(
            targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, spec,
            rollout_norm, demo_norm, dtype,
        )  # fmt: skip
    flat, is_demo = targets.reshape(-1), is_demo.to(device).contiguous()
    offsets = torch.empty(sequences + 1, dtype=torch.int64, device=device)
    lengths = torch.empty(sequences, dtype=torch.int64, device=device)
    flags = torch.empty(2, n, dtype=torch.bool, device=device)
    sequence = torch.empty(n, dtype=torch.int64, device=device)
    floats = torch.empty(5, n, dtype=torch.float32, device=device)
    width = n if cu_seqlens is not None else targets.shape[1]
    lengths_launch(flat, cu_seqlens, offsets, lengths, width).run(device)
    mu = mu.to(device=device, dtype=dtype) if isinstance(mu, Tensor) else mu
    tokens = Tokens(
        flat, flags[0], flags[1], floats[0], None if old_logps is None else floats[3],
        None if ref_logps is None else floats[4], floats[1], floats[2], sequence, offsets, lengths,
        is_demo, mu,
    )  # fmt: skip
    tokens_launch(
        tokens, floats, advantages, old_logps, ref_logps, spec, rollout_norm, demo_norm,
        -(-width // BLOCK),
    ).run(device)  # fmt: skip
    return tokens


def lengths_launch(
    targets: Tensor, cu_seqlens: Tensor | None, offsets: Tensor, lengths: Tensor, width: int
) -> Launch:
    """offsets int64 [S + 1] and lengths int64 [S]; width: tokens of a padded sequence."""
    arguments = {
        "targets": targets.contiguous(),
        "cu_seqlens": None if cu_seqlens is None else _there(cu_seqlens, targets),
        "offsets": offsets,
        "lengths": lengths,
        "T": width,
        "S": lengths.numel(),
        "BLOCK": BLOCK,
    }
    return Launch(lengths_kernel, lengths.numel(), arguments, _WARPS)


def tokens_launch(
    tokens: Tokens,
    floats: Tensor,
    advantages: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    spec: LossSpec,
    rollout_norm: float | Tensor | None,
    demo_norm: float | Tensor | None,
    blocks: int,
) -> Launch:
    """Everything per token; `blocks` = of the longest sequence that there can be."""
    programs = min(blocks, _SHARED)
    rollout, rollout_number = _number(rollout_norm, tokens.targets)
    demo, demo_number = _number(demo_norm, tokens.targets)
    arguments = {
        "targets": tokens.targets.contiguous(),
        "advantages": _there(advantages, tokens.targets),
        "is_demo": tokens.is_demo,
        "old": None if old_logps is None else _there(old_logps, tokens.targets),
        "ref": None if ref_logps is None else _there(ref_logps, tokens.targets),
        **_mu(tokens.mu),
        "rollout_norm": rollout,
        "demo_norm": demo,
        "offsets": tokens.offsets,
        "lengths": tokens.lengths,
        "live": tokens.live,
        "demo": tokens.demo,
        "sequence": tokens.sequence,
        "floats": floats,
        "N": tokens.live.numel(),
        "S": tokens.is_demo.numel(),
        "P": programs,
        "rollout_number": rollout_number,
        "demo_number": demo_number,
        "max_tokens": float(spec.max_tokens or 1),
        "PER_SEQUENCE": advantages.shape == tokens.is_demo.shape,
        "SHAPED": spec.demo_weight is DemoWeight.SHAPED,
        "ROLLOUT": spec.rollout_reduction,
        "DEMO": spec.demo_reduction,
        "ROLLOUT_OWN": rollout_norm is None,
        "DEMO_OWN": demo_norm is None,
        "BLOCK": BLOCK,
    }
    return Launch(tokens_kernel, tokens.is_demo.numel() * programs, arguments, _WARPS)


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> Summary:
    device, sequences = tokens.live.device, tokens.is_demo.numel()
    new = lambda *shape: torch.empty(shape, dtype=torch.float64, device=device)  # noqa: E731 - one line
    sums = new(SUMS, sequences)
    statistics = TokenMoments(new(7), new(sequences), new(6)) if moments else None
    loss = torch.empty((), dtype=torch.float32, device=device)  # no view: it may change in place
    scalars = torch.empty(4, dtype=torch.float32, device=device)
    sequence_launch(tokens, terms, sums, statistics).run(device)
    merge_launch(tokens, sums, loss, scalars, statistics).run(device)
    return Summary(loss, scalars[0], scalars[1], scalars[2], scalars[3], statistics)


def sequence_launch(
    tokens: Tokens, terms: TokenTerms, sums: Tensor, statistics: TokenMoments | None
) -> Launch:
    """sums float64 [SUMS, S], and the demonstrations' mean negative log-likelihoods."""
    names = ("live", "advantages", "weight", "offsets", "lengths", "is_demo")
    arguments = {
        **{name: getattr(tokens, name).contiguous() for name in names},
        **{name: x.contiguous() for name, x in terms._asdict().items()},
        "sums": sums,
        "demo_nll": None if statistics is None else statistics.demo_nll,
        "S": tokens.is_demo.numel(),
        "BLOCK": BLOCK,
    }
    return Launch(sequence_kernel, tokens.is_demo.numel(), arguments, _WARPS)


def merge_launch(
    tokens: Tokens, sums: Tensor, loss: Tensor, scalars: Tensor, statistics: TokenMoments | None
) -> Launch:
    """loss 0-d, the other scalars [4], and the moments."""
    arguments = {
        "sums": sums,
        "lengths": tokens.lengths.contiguous(),
        "is_demo": tokens.is_demo.contiguous(),
        **_mu(tokens.mu),
        "mixed": loss,
        "scalars": scalars,
        "moments": None if statistics is None else statistics.rollouts,
        "totals": None if statistics is None else statistics.totals,
        "S": tokens.is_demo.numel(),
        "HAS_REF": tokens.ref is not None,
        "BLOCK": BLOCK // 2,  # it has eight sums at once
    }
    return Launch(merge_kernel, 1, arguments, _WARPS)


def _there(x: Tensor, like: Tensor) -> Tensor:
    """[N] or [S], where the kernels can read it; any float dtype."""
    return x.detach().reshape(-1).to(like.device).contiguous()


def _mu(mu: float | Tensor) -> dict[str, Any]:
    """A tensor stays where it is: no host synchronisation."""
    pointer, number = (mu, 0.0) if isinstance(mu, Tensor) else (None, float(mu))
    return {"mu": pointer, "mu_number": number, "mu_rest": 1 - number}


def _number(value: float | Tensor | None, like: Tensor) -> tuple[Tensor | None, float]:
    """A number that a kernel takes as an argument, or a pointer to one on its device."""
    if isinstance(value, Tensor) and (value.device.type != "cpu" or like.device.type == "cpu"):
        return value.to(like.device), 0.0
    return None, 0.0 if value is None else float(value)
