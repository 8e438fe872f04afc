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

    Every row of a unit must be on one rank.
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
        """Of the units of all ranks, in rank order, the same on each of them."""
        assert self.sketch is not None
        width = self.sketch.size**2
        found = torch.cat([torch.empty(0, width), *(x.cpu() for x in self.found)]).double()
        sides = [_sums(self.rows, found, demo) for demo in (True, False)]
        # gradients are averaged over ranks, so that each rank's loss is as many times its share
        everyone = zip(*collectives.gather(sides), strict=True)
        return Sketches(*(torch.cat(side) / collectives.ranks() for side in everyone))


def _sums(rows: Sequence[Row], found: Tensor, demo: bool) -> Tensor:
    """[units of that kind, k k]; a demonstration and a rollout without a unit are one each."""
    index: list[int] = []
    place: dict[tuple[int, int], int] = {}
    kept = [i for i, row in enumerate(rows) if row.is_demo == demo]
    for i in kept:
        alone = demo or rows[i].unit < 0
        key = (-1, i) if alone else (rows[i].unit, 0)
        index.append(place.setdefault(key, len(place)))
    sums = found.new_zeros(len(place), found.shape[1])
    return sums.index_add_(0, torch.tensor(index, dtype=torch.long), found[kept])
