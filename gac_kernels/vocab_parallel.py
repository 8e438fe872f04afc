"""The fused loss with the vocabulary sharded over ranks: no rank holds [V, H] or [N, V].

Rank r holds consecutive rows of the weight and computes the corresponding columns of the logits.
For each block of tokens, the ranks gather three numbers per token, [3, M]: the logsumexp and the
entropy of their part of the distribution, and the target's logit. The gradient of the hidden
states, [N, H], is all-reduced once.

Notation: N tokens, M tokens of a chunk, V vocabulary size, H hidden size, R ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import candidates, checks
from .contract import IGNORE, LossOutput, LossSpec
from .loss import Fused, fused_loss
from .reference import TwoCalls
from .tokens import Scaling, Upstream


def vocab_parallel_gac_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor | None = None,
    is_demo: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    mu: float | Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    temperatures: Tensor | None = None,
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
        weight: this rank's rows [V_r, H] of the weight, ranks in order; at least one row each,
            such as `full_weight.tensor_split(ranks)[rank]`.
        targets: int64 token ids in [0, V), with V the full vocabulary size; -100 = no loss.
        group: the ranks that share the vocabulary; None: all ranks.
        bias: this rank's entries [V_r], or None.
        chunk_bytes: memory for one chunk's logits on the rank with the most rows.

    Other arguments, errors and results are as in `fused_linear_gac_loss`.
    """
    checks.row_tensor("hidden", hidden, targets)
    inputs = checks.complete(
        targets,
        advantages,
        is_demo,
        spec=spec,
        mu=mu,
        old_logps=old_logps,
        ref_logps=ref_logps,
        cu_seqlens=cu_seqlens,
        rollout_norm=rollout_norm,
        demo_norm=demo_norm,
        weights=weights,
        rollout_logps=rollout_logps,
        teacher_logps=teacher_logps,
        teacher_ids=teacher_ids,
        temperatures=temperatures,
    )
    checks.batch_inputs(hidden, inputs, spec)
    checks.tensor("weight", weight)
    sizes = _sizes(weight, group)
    scaled_inputs, scaled_spec = checks.scaled(inputs, spec, hidden, weight, logit_scale)
    op = checks.operands(
        hidden,
        weight,
        bias,
        targets,
        temperature=spec.temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend="auto",
        chunk_bytes=chunk_bytes,
        inputs=inputs,
        vocabulary=sum(sizes),
    )
    # all ranks must use the same chunks, even if the weight rows are sharded unevenly
    backend = ShardedRows(sum(sizes[: dist.get_rank(group)]), sum(sizes), group, op.backend)
    needs, rows = op.needs, op.rows.view_as(op.rows)
    if needs.rows:  # all ranks add their parts of the gradient of this call
        rows.register_hook(lambda grad: backend.all_reduce(grad.contiguous()))
    op = replace(op, rows=rows, backend=backend, vocab_size=max(sizes))
    outputs: list[Any] = []
    compute = partial(fused_loss, op, scaled_inputs, scaled_spec, needs, moments=moments)
    total = Fused.apply(*op.leaves, op, compute, outputs)
    return outputs[0]._replace(loss=total)


def _sizes(weight: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Gather the number of weight rows of each rank."""
    local = torch.tensor([len(weight)], device=weight.device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return [int(n) for n in gathered]


class ShardedRows(TwoCalls):
    """Backend (see `backends`) for a vocabulary shard, whose first entry is `start` of `size`."""

    def __init__(
        self, start: int, size: int, group: dist.ProcessGroup | None, inner: ModuleType
    ) -> None:
        super().__init__(inner)
        self.start, self.size, self.group = start, size, group

    def row_stats(
        self,
        logits: Tensor,
        targets: Tensor,
        scaling: Scaling,
        *,
        more_outputs: bool = False,
    ) -> tuple[Tensor, ...]:
        assert not more_outputs, "the vocabulary-parallel loss needs no further outputs"
        local = self._local(targets, logits)
        own = torch.stack(self.inner.row_stats(logits, local, scaling))
        # the target's logit, in nats; if all entries here are masked, its log-prob here is nan
        logit = torch.where(own[2] == -torch.inf, -torch.inf, own[0] + own[2])
        own[0] = torch.where(local < 0, 0, logit)
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(ranks, own, group=self.group)
        target, entropy, lse = torch.stack(ranks, 1)
        total = lse.logsumexp(0)
        log_share = lse - total
        share = log_share.exp()
        # a rank whose entries are all masked has a share of 0 and no entropy
        mixed = torch.where(share == 0, 0, share * (entropy - log_share)).sum(0)
        live = targets != IGNORE
        inside = (targets >= 0) & (targets < self.size)  # a GPU's targets are not checked
        results = torch.where(inside, target.sum(0) - total, torch.nan), mixed, total
        return tuple(torch.where(live, x, 0) for x in results)

    def row_grads(
        self,
        logits: Tensor,
        targets: Tensor,
        scaling: Scaling,
        upstream: Upstream,
        out: Tensor,
        *,
        whole_row: bool = False,
    ) -> None:
        assert not whole_row, "a shard has a part of each row"
        local = self._local(targets, logits)
        self.inner.row_grads(logits, local, scaling, upstream, out, whole_row=False)

    def candidates(
        self, logits: Tensor, ids: Tensor, lse: Tensor, scaling: Scaling
    ) -> candidates.Candidates:
        """`candidates.candidates` with local ids; every rank gets all log-probabilities."""
        local = self._local(ids, logits)
        rows = candidates.candidates(logits, local, lse, scaling)
        logps = self.all_reduce(torch.where(local == -1, 0, rows.logps))
        outside = (ids != IGNORE) & ((ids < 0) | (ids >= self.size))
        return rows._replace(logps=logps.masked_fill_(outside, torch.nan))

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def _local(self, targets: Tensor, logits: Tensor) -> Tensor:
        """Local column of each target, -1 if another rank has it, IGNORE without a loss."""
        local = targets - self.start
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        return torch.where(targets == IGNORE, IGNORE, torch.where(elsewhere, -1, local))
