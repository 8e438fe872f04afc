"""What a step measures besides the gradient of its mixed loss: one probe per file.

A `Probe` sees the output of every micro-batch. `parts`, `bias` and `averages` work on several
separate gradients instead of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gac.data.rows import Batch, Row
from gac_kernels import LossOutput


class Probe(Protocol):
    """Collects measurements from the forward passes of a step."""

    def add(self, batch: Batch, rows: Sequence[Row], out: LossOutput) -> None:
        """Add the output of a micro-batch; `rows` may be empty."""
