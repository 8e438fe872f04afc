"""Forward passes over rows: micro-batches, and log-probs of the policy and the reference."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gac.data.micro import MicroBatches
from gac.data.rows import Batch, Row, collate
from gac.models.causal_lm import Head
from gac.parallel import collectives
from gac.parallel.setup import reshard

_kind = operator.attrgetter("kind")


@dataclass(frozen=True)
class Forward:
    """The models of a run, and how their forward passes group rows."""

    accelerator: Accelerator
    model: nn.Module
    """The prepared policy."""
    reference: nn.Module | None
    """The frozen initial policy; None: the policy without its adapters."""
    temperature: float
    """Temperature of the rollouts; demonstrations are scored at 1."""
    micro: MicroBatches
    """How rows of one kind are grouped into micro-batches, packed or padded."""
    pad_token: int

    def schedule(self, rows: Sequence[Row]) -> list[tuple[bool, list[Row]]]:
        """Split `rows` into micro-batches of one kind each, as (is_demo, rows).

        Every rank gets the same sequence of demonstration and rollout micro-batches, some of them
        empty, because each forward of the policy or the reference may be a collective.
        """
        kinds: dict[bool, list[list[Row]]] = {False: [], True: []}
        for (demo, *_), group in itertools.groupby(sorted(rows, key=_kind), _kind):
            kinds[demo].append(list(group))
        splits = {demo: [*itertools.chain(*map(self.micro.split, kinds[demo]))] for demo in kinds}
        counts = collectives.largest([len(parts) for parts in splits.values()])
        micro_batches: list[tuple[bool, list[Row]]] = []
        for (demo, parts), count in zip(splits.items(), map(int, counts), strict=True):
            if len(kinds[demo]) == 1:
                # smaller micro-batches instead of empty ones
                parts = self.micro.split(kinds[demo][0], count)
            micro_batches += [(demo, part) for part in parts + [[]] * (count - len(parts))]
        return micro_batches

    def collate(self, rows: Sequence[Row]) -> Batch:
        """The tensors of one forward pass."""
        return collate(rows, self.pad_token, self.accelerator.device, self.micro.packed)

    @torch.no_grad()
    def row_logprobs(self, rows: Sequence[Row], model: nn.Module | None = None) -> list[Tensor]:
        """Log-probs of each row's loss tokens, in the order of `rows`, on the CPU.

        model: None = the policy.
        """
        model = self.model if model is None else model
        by_sequence: dict[int, Tensor] = {}
        for _, micro in self.schedule(rows):
            batch = self.collate(micro)
            logps = model(**batch.model_inputs, request=self._logprobs(batch)).cpu().flatten()
            # without rows, the batch still has one dummy row
            for start, row in zip(batch.starts, micro, strict=False):
                by_sequence[row.sequence] = logps[row.scored(start)].clone()
        reshard(model)
        return [by_sequence[row.sequence] for row in rows]

    def teacher_logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """Like `row_logprobs`, but the policy also sees each row's context; nan without one."""
        seen = [
            row._replace(ids=row.context + row.ids, start=row.start + len(row.context), switch=-1)
            for row in rows
        ]
        logps = self.row_logprobs(seen)
        pairs = zip(rows, logps, strict=True)
        return [x if row.context else torch.full_like(x, math.nan) for row, x in pairs]

    @contextlib.contextmanager
    def reference_model(self) -> Iterator[nn.Module]:
        """Yield the frozen initial policy; with adapters, the policy with its adapters disabled."""
        if self.reference is not None:
            yield self.reference
        else:
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                yield self.model

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, demo: bool) -> Tensor:
        """Reference log-probs, shaped like the targets; zeros for demonstrations."""
        if demo:
            return torch.zeros(batch.targets.shape, device=batch.targets.device)
        with self.reference_model() as model:
            return model(**batch.model_inputs, request=self._logprobs(batch))

    def _logprobs(self, batch: Batch) -> Callable[[Head], Tensor]:
        """Function that computes the targets' log-probs from the head."""
        return lambda head: head.logprobs(batch.targets, self.temperature)[0]
