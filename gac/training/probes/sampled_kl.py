"""The KL to the reference, estimated from `kl_sample_size` rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gac.data.rows import Batch, Row
from gac.parallel import collectives
from gac.training.forward import Forward
from gac.training.step import Step
from gac_kernels import LossOutput


class SampledKL:
    """Mean k3 estimate over `count` of this rank's rollouts, selected by the step number."""

    def __init__(self, forward: Forward, step: Step, count: int) -> None:
        rows = [row for row in step.rows if not row.is_demo and not row.mixed]
        count = min(count, len(rows))
        chosen = [rows[(step.number + i * len(rows) // count) % len(rows)] for i in range(count)]
        with forward.reference_model() as model:
            logps = forward.row_logprobs(chosen, model)
        self.reference = {row.sequence: x for row, x in zip(chosen, logps, strict=True)}
        self.sums = torch.zeros(2, dtype=torch.float64)  # sum of the estimates, number of tokens

    def add(self, batch: Batch, rows: Sequence[Row], out: LossOutput) -> None:
        """Add those rows of a micro-batch that were selected in the constructor."""
        # without rows, the batch still has one dummy row
        for start, row in zip(batch.starts, rows, strict=False):
            if row.sequence in self.reference:
                logps = out.logps.flatten()[row.scored(start)].cpu()
                gap = self.reference[row.sequence] - logps
                self.sums += torch.tensor([(gap.double().exp() - gap - 1).sum(), len(gap)])

    def mean(self) -> float:
        """The mean over all ranks, in nats per token; nan if there are no tokens."""
        total, tokens = collectives.total(self.sums.tolist())
        return total / tokens if tokens else math.nan
