"""The losses and the token statistics of a step, which every step measures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gac.control.term_pair import TermPair
from gac.data.rows import Batch, Row
from gac.parallel import collectives
from gac_kernels import LossOutput, TokenMoments


class Totals:
    """Sums the losses and merges the token statistics of the micro-batches."""

    def __init__(self) -> None:
        self.terms: list[Tensor] = []  # [demo loss, rollout loss]
        self._moments: list[TokenMoments] = []

    def add(self, batch: Batch, rows: Sequence[Row], out: LossOutput) -> None:
        """Add a micro-batch."""
        assert out.moments is not None
        self.terms.append(torch.stack([out.demo_loss, out.rollout_loss]))
        self._moments.append(out.moments)

    def losses(self) -> TermPair:
        """The two loss terms, reduced over all ranks."""
        terms = torch.stack(self.terms or [torch.zeros(2)]).double().sum(0)
        return TermPair(*collectives.mean(terms.tolist()))

    def moments(self, device: torch.device) -> TokenMoments:
        """The statistics of all ranks; `device` is used if there are no rows."""
        return TokenMoments.merged(self._moments or [TokenMoments.zeros(device)]).all_reduce()
