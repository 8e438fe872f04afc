"""The rows of a vocabulary shard: the ranks that share a vocabulary combine their statistics.

Notation: M rows, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from . import candidates
from .contract import IGNORE
from .reference import TwoCalls
from .tokens import Scaling, Upstream


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
        local = self.local(targets, logits.shape[-1])
        return self.combine(self.inner.row_stats(logits, local, scaling), targets, local)

    def combine(
        self, stats: Sequence[Tensor], targets: Tensor, local: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The `row_stats` of rows [M] from those of every rank's shard; local: as from `local`."""
        own = torch.stack(tuple(stats))
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
        logps, entropy, lse = (torch.where(live, x, 0) for x in results)
        return logps, entropy, lse

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
        local = self.local(targets, logits.shape[-1])
        self.inner.row_grads(logits, local, scaling, upstream, out, whole_row=False)

    def candidates(
        self, logits: Tensor, ids: Tensor, lse: Tensor, scaling: Scaling
    ) -> candidates.Candidates:
        """`candidates.candidates` with local ids; every rank gets all log-probabilities."""
        local = self.local(ids, logits.shape[-1])
        rows = candidates.candidates(logits, local, lse, scaling)
        logps = self.all_reduce(torch.where(local == -1, 0, rows.logps))
        outside = (ids != IGNORE) & ((ids < 0) | (ids >= self.size))
        return rows._replace(logps=logps.masked_fill_(outside, torch.nan))

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def local(self, targets: Tensor, width: int) -> Tensor:
        """The column of each target in a shard of this width.

        It is -1 if another rank has it, and IGNORE without a loss.
        """
        local = targets - self.start
        elsewhere = (local < 0) | (local >= width)
        return torch.where(targets == IGNORE, IGNORE, torch.where(elsewhere, -1, local))
