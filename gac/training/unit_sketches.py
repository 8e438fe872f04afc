"""Sketches of the head's gradient, added up to units over micro-batches and gathered over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gac.control.evidence import Sketches
from gac.data.rows import Row
from gac.parallel import collectives
from gac_kernels import HeadSketch


class UnitSketches:
    """What the loss says of each row. size: of the sketch, 0 for none; seed: the same on all ranks.

    The rows of a unit may be on several ranks.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.sketch = HeadSketch(size, seed) if size else None
        self.rows: list[Row] = []
        self.found: list[Tensor] = []  # [rows of the micro-batch, k k]

    def add(self, rows: Sequence[Row], found: Tensor | None) -> None:
        """found: [B, k, k] of a micro-batch; None, or without rows, there is nothing to add."""
        if rows and found is not None:
            self.rows += rows
            self.found.append(found.detach().flatten(1))  # copied to the CPU only once, at the end

    def gathered(self) -> Sketches:
        """Of the units of all ranks, the same on each of them."""
        assert self.sketch is not None
        width = self.sketch.size**2
        found = torch.cat([torch.empty(0, width), *(x.cpu() for x in self.found)]).double()
        sides = []
        for demo in (True, False):
            kept = [i for i, row in enumerate(self.rows) if row.is_demo == demo]
            units = [-1 if demo else self.rows[i].unit for i in kept]
            sides.append(_sums(units, found[kept]))
        # gradients are averaged over ranks, so that each rank's loss is as many times its share
        return Sketches(*(
            _sums([unit for units, _ in side for unit in units],
                  torch.cat([sums for _, sums in side]))[1] / collectives.ranks()
            for side in zip(*collectives.gather(sides), strict=True)
        ))  # fmt: skip


def _sums(units: Sequence[int], found: Tensor) -> tuple[list[int], Tensor]:
    """Each unit, and the sum [k k] of what belongs to it; what has the unit -1 is one by itself."""
    index: list[int] = []
    place: dict[tuple[int, int], int] = {}
    for i, unit in enumerate(units):
        index.append(place.setdefault((unit, i if unit < 0 else 0), len(place)))
    sums = found.new_zeros(len(place), found.shape[1])
    return [unit for unit, _ in place], sums.index_add_(0, torch.tensor(index).long(), found)
