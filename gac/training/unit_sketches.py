"""Sketches of the head's gradient, summed per unit over micro-batches and gathered from all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gac.control.evidence import Sketches
from gac.data.rows import Row
from gac.parallel import collectives
from gac_kernels import HeadSketch


class UnitSketches:
    """Collects the loss's sketches of each row. size: 0 disables them; seed: the same on all ranks.

    The rows of a unit may be spread over several ranks.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.sketch = HeadSketch(size, seed) if size else None
        self.rows: list[Row] = []
        self.found: list[Tensor] = []  # [rows of the micro-batch, k k]

    def add(self, rows: Sequence[Row], found: Tensor | None) -> None:
        """Add the sketches [B, k, k] of a micro-batch; a no-op if there are none or no rows."""
        if rows and found is not None:
            self.rows += rows
            self.found.append(found.detach().flatten(1))  # copied to the CPU only once, at the end

    def gathered(self) -> Sketches:
        """Sketches of all ranks' units; the same on every rank."""
        assert self.sketch is not None
        width = self.sketch.size**2
        found = torch.cat([torch.empty(0, width), *(x.cpu() for x in self.found)]).double()
        sides = []
        for demo in (True, False):
            kept = [i for i, row in enumerate(self.rows) if row.is_demo == demo]
            units = [-1 if demo else self.rows[i].unit for i in kept]
            sides.append(_sums(units, found[kept]))
        # gradients are averaged over ranks, so each rank's loss is scaled by the world size; undo
        # that
        return Sketches(
            *(
                _sums(
                    [unit for units, _ in side for unit in units],
                    torch.cat([sums for _, sums in side]),
                )[1]
                / collectives.ranks()
                for side in zip(*collectives.gather(sides), strict=True)
            )
        )


def _sums(units: Sequence[int], found: Tensor) -> tuple[list[int], Tensor]:
    """The units, and the sum [k k] of each unit's sketches; every row with unit -1 is its own unit."""
    index: list[int] = []
    place: dict[tuple[int, int], int] = {}
    for i, unit in enumerate(units):
        index.append(place.setdefault((unit, i if unit < 0 else 0), len(place)))
    sums = found.new_zeros(len(place), found.shape[1])
    return [unit for unit, _ in place], sums.index_add_(0, torch.tensor(index).long(), found)
