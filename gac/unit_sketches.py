"""Head sketches of the units of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gac import collectives
from gac.types import Sketches
from gac_kernels import LossOutput

if TYPE_CHECKING:
    from gac.rows import Batch, Row  # needs numpy


class UnitSketches:
    """Collects one gradient sketch [k, k] per row; a unit's rows may be on several ranks."""

    def __init__(self, size: int) -> None:
        self.width = size**2
        self.rows: list[Row] = []
        self.sketches: list[Tensor] = []  # per micro-batch, [rows, k k]

    def add(self, batch: Batch | None, rows: Sequence[Row], out: LossOutput) -> None:
        """Add a micro-batch."""
        if rows and out.sketch is not None:
            self.rows += rows
            self.sketches.append(out.sketch.detach().flatten(1))  # on the device until the end

    def gathered(self) -> Sketches:
        """The sketches of all ranks' units; the same on every rank."""
        empty = torch.empty(0, self.width)
        sketches = torch.cat([empty, *(x.cpu() for x in self.sketches)]).double()
        local_sums = []  # of the demonstrations, then of the rollouts
        for demo in (True, False):
            chosen = [i for i, row in enumerate(self.rows) if row.is_demo == demo]
            units = [-1 if demo else self.rows[i].unit for i in chosen]
            local_sums.append(_sum_units(units, sketches[chosen]))
        totals = []
        for by_rank in zip(*collectives.gather(local_sums), strict=True):
            units = [unit for units, _ in by_rank for unit in units]
            _, sums = _sum_units(units, torch.cat([sums for _, sums in by_rank]))
            # gradients are averaged over ranks, so each rank's loss is scaled by the world size
            totals.append(sums / collectives.world_size())
        return Sketches(*totals)


def _sum_units(units: Sequence[int], sketches: Tensor) -> tuple[list[int], Tensor]:
    """Sum the sketches of each unit; returns the distinct units and their sums [units, k k].

    Every row with a negative unit is its own unit.
    """
    index: list[int] = []
    numbers: dict[int, int] = {}
    for i, unit in enumerate(units):
        index.append(numbers.setdefault(unit if unit >= 0 else ~i, len(numbers)))
    sums = sketches.new_zeros(len(numbers), sketches.shape[1])
    return [*numbers], sums.index_add_(0, torch.tensor(index).long(), sketches)
