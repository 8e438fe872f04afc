"""Groups rows into micro-batches, by number of rows or number of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .rows import Row

Unit = Sequence[Row]  # consecutive rows that are never split


@dataclass(frozen=True)
class MicroBatches:
    """Options for splitting a rank's rows of one kind into micro-batches."""

    rows: int | None = None
    """Rows per micro-batch if `tokens` is None; None: all."""
    tokens: int | None = None
    """Tokens per micro-batch, including padding unless the rows are packed."""
    packed: bool = False
    """Concatenate the rows instead of padding them; requires `tokens`."""
    unit: int = 1
    """Number of consecutive rows that are never split across micro-batches."""

    def split(self, rows: Sequence[Row], min_count: int = 1) -> list[list[Row]]:
        """Split `rows` into micro-batches. Raises ValueError if a unit exceeds `tokens`.

        min_count: with packing, the minimum number of micro-batches, if there are enough units.
        """
        if self.tokens is None:
            size = max(self.rows // self.unit, 1) * self.unit if self.rows else max(len(rows), 1)
            return [list(rows[i : i + size]) for i in range(0, len(rows), size)]
        units = [rows[i : i + self.unit] for i in range(0, len(rows), self.unit)]
        self._check(units)
        parts = self._pack(units, min_count) if self.packed else self._fill(units)
        return [[row for unit in part for row in unit] for part in parts]

    def _cost(self, unit: Unit) -> int:
        lengths = [len(row.ids) for row in unit]
        return sum(lengths) if self.packed else len(lengths) * max(lengths)

    def _check(self, units: Sequence[Unit]) -> None:
        assert self.tokens is not None
        longest = max(map(self._cost, units), default=0)
        if longest > self.tokens:
            what = "a row" if self.unit == 1 else f"a unit of {self.unit} rows"
            raise ValueError(
                f"max_tokens_per_micro_batch={self.tokens}: this step has {what} with {longest} "
                f"tokens, which must fit into one forward: use {longest} or more, or null"
            )

    def _pack(self, units: Sequence[Unit], min_count: int) -> list[list[Unit]]:
        """Distribute the units over few parts with similar numbers of tokens.

        Greedy: longest unit first, each to the part with the fewest tokens.
        """
        assert self.tokens is not None
        costs = list(map(self._cost, units))
        order = sorted(range(len(units)), key=lambda i: -costs[i])
        count = max(-(-sum(costs) // self.tokens), min(min_count, len(units)))
        while True:
            heap = [(0, part) for part in range(count)]
            parts: list[list[int]] = [[] for _ in heap]
            for i in order:
                load, part = heapq.heappop(heap)
                parts[part].append(i)
                heapq.heappush(heap, (load + costs[i], part))
            if all(load <= self.tokens for load, _ in heap):
                return [[units[i] for i in sorted(part)] for part in parts]
            count += 1  # terminates: one unit per part always fits

    def _fill(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """Group units of similar length; a group has at most `tokens` tokens, with padding."""
        assert self.tokens is not None
        parts: list[list[Unit]] = []
        cost = remaining = 0  # tokens per unit of the current part; tokens left in its budget
        for unit in sorted(units, key=self._cost, reverse=True):
            if not parts or cost > remaining:
                parts.append([])
                # the first unit of a part is the longest, and the others are padded to it
                cost, remaining = self._cost(unit), self.tokens
            parts[-1].append(unit)
            remaining -= cost
        return parts
