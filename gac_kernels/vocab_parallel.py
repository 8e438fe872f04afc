"""The fused loss with the vocabulary sharded over ranks: no rank holds [V, H] or [N, V].

Rank r holds consecutive rows of the weight and computes the corresponding columns of the logits.
For each chunk of tokens, the ranks all-reduce two small tensors: the maximum [M], then three sums
[3, M] (of exp, of exp times logit, and the target's logit). The gradient of the hidden states, [N,
H], is all-reduced once.

Notation: N tokens, M tokens of a chunk, V vocabulary size, H hidden size, R ranks.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from . import backends, checks, reference
from .api import check_head, fold_scaling, with_temperature
from .autograd import FusedLinearLoss, LossTask, loss_output
from .contract import LossOutput, LossSpec
from .inputs import BatchInputs
from .linear import NeedsGrad
from .tokens import Tokens, TokenTerms, with_factors


def shard_bounds(vocabulary: int, ranks: int, rank: int) -> tuple[int, int]:
    """Split the rows of a [V, H] weight evenly over ranks: the [start, stop) of `rank`."""
    return vocabulary * rank // ranks, vocabulary * (rank + 1) // ranks


def vocab_parallel_gac_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    is_demo: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    mu: float | Tensor = 0.5,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    moments: bool = True,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
) -> LossOutput:
    """Compute `fused_linear_gac_loss` of one batch that is replicated on every rank of `group`.

    Every rank gets the same output (do not sum the loss or its moments over `group`), the full
    gradient of `hidden` and the gradient of its own weight rows.

    Args:
        hidden: [B, T, H], or packed [N, H]; the same on every rank.
        weight: this rank's rows [V_r, H] of the weight, ranks in order; at least one row each.
        targets: int64 token ids in [0, V), with V the full vocabulary size; -100 = no loss.
        group: the ranks that share the vocabulary; None: all ranks.
        bias: this rank's entries [V_r], or None.
        chunk_bytes: memory for one chunk's logits on the rank with the most rows.

    Other arguments, errors and results are as in `fused_linear_gac_loss`.
    """
    options = check_head(hidden, weight, targets, bias, chunk_bytes)
    inputs = BatchInputs(
        *(targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens),
        *(rollout_norm, demo_norm, weights, rollout_logps),
    )
    checks.batch(hidden, inputs, spec)
    scaling = fold_scaling(spec.temperature, logit_scale, softcap)
    spec = with_temperature(spec, scaling)
    accum_dtype = reference.compute_dtype(options.dtype)
    inner = backends.choose("auto", hidden.device, accum_dtype)
    sizes = _sizes(weight, group)
    checks.values(targets, sum(sizes), cu_seqlens, weights)
    with torch.no_grad():
        tokens = with_factors(inner.plan(inputs, spec, accum_dtype), inputs, spec)
    # all ranks must use the same chunks, even if the weight rows are sharded unevenly
    options = options._replace(vocab_size=max(sizes))
    backend = ShardedRows(sum(sizes[: dist.get_rank(group)]), group, inner)
    task = LossTask(tokens, spec, backend, moments, softcap=scaling.softcap)
    needs = NeedsGrad.of(hidden, weight, bias)
    flat_hidden = SumGradient.apply(hidden.reshape(-1, hidden.shape[-1]), group)
    flat = FusedLinearLoss.apply(flat_hidden, weight, bias, task, needs, options)
    return loss_output(flat, targets.shape)


def _sizes(weight: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Gather the number of weight rows of each rank."""
    local = torch.tensor([len(weight)], device=weight.device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return [int(n) for n in gathered]


class SumGradient(Function):
    """Identity in the forward pass; the backward pass all-reduces the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ShardedRows:
    """Backend (see `backends`) for a vocabulary shard, whose first entry is `start`."""

    def __init__(self, start: int, group: dist.ProcessGroup | None, inner: ModuleType) -> None:
        self.start, self.group = start, group
        self.scale_, self.reduce = inner.scale_, inner.reduce

    def row_loss(
        self,
        logits: Tensor,
        tokens: Tokens,
        spec: LossSpec,
        out: Tensor | None,
        sketch: None = None,  # not supported here
        softcap: float | None = None,
    ) -> TokenTerms:
        capped = reference.scale_logits(logits[0], 1.0, softcap)
        local, is_local = self._local(tokens.targets, capped.shape[1])
        exps, stats = self._statistics(capped / spec.temperature, local, is_local)
        logps, entropy, log_sum = stats
        terms, upstream = reference.token_gradients(logps, entropy, tokens, spec, out is not None)
        if out is not None and upstream is not None:
            d_logps, d_entropy = upstream
            p = exps.mul_((-log_sum).exp()[:, None])
            log_p = (p.log()).masked_fill_(p == 0, 0)
            grad = p * (-d_logps - d_entropy * entropy)[:, None]
            grad -= p * log_p * d_entropy[:, None]
            grad.scatter_add_(1, local, (d_logps * is_local)[:, None])
            if softcap is not None:
                grad *= reference.cap_slope(capped, softcap)
            out[0].copy_(grad / spec.temperature)
        return terms

    def row_stats(
        self, logits: Tensor, targets: Tensor, temperature: float, softcap: float | None, more: bool
    ) -> tuple[Tensor, ...]:
        assert not more, "the vocabulary-parallel loss needs no further outputs"
        z = reference.scale_logits(logits[0], temperature, softcap)
        _, stats = self._statistics(z, *self._local(targets, z.shape[1]))
        return stats

    def _local(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Local column of each target [M, 1], 0 if it is not local; and whether it is local [M]."""
        local = targets - self.start
        is_local = (local >= 0) & (local < width)
        return torch.where(is_local, local, 0)[:, None], is_local

    def _statistics(
        self, z: Tensor, local: Tensor, is_local: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Compute exp(z - max) of this rank's columns, and the statistics over all columns.

        The statistics are logps, entropy and log sum exp(z - max), [M] each.

        Args:
            z: [M, V_r] of logits / temperature, overwritten.
            local: [M, 1] of the target's local column, valid if `is_local`.
            is_local: [M], whether this rank holds the target.
        """
        maximum = z.amax(1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
        z -= maximum[:, None]
        exps = z.exp()
        # a masked vocabulary entry (-inf) adds 0 log 0 = 0
        weighted = torch.where(exps == 0, 0, exps * z)
        target = torch.where(is_local, z.gather(1, local)[:, 0], 0)
        sums = torch.stack([exps.sum(1), weighted.sum(1), target])
        dist.all_reduce(sums, group=self.group)
        log_sum = sums[0].log()
        # +inf logits are an error, not a token of probability 1
        log_sum = torch.where(maximum == math.inf, math.nan, log_sum)
        return exps, (sums[2] - log_sum, log_sum - sums[1] / sums[0], log_sum)
