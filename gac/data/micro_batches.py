"""Micro-batches of a rank's rows, and the division of rows between ranks."""

from __future__ import annotations

import heapq
import itertools
import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gac import collectives
from gac.rows import Batch, Row, collate

from .stored import Example


def demo_row(example: Example, tokens: int | None = None) -> Row:
    """The row of an example's demonstration; only its last `tokens` have a loss (None: all)."""
    demo = example.demo or ()
    with_loss = len(demo) if tokens is None else min(tokens, len(demo))
    ids = example.prompt + demo
    mask = example.demo_mask[len(demo) - with_loss :]
    return Row(ids, len(ids) - with_loss, True, 1.0, source=example.source, mask=mask)


class MicroBatch(NamedTuple):
    """Rows of one kind that pass through the model together; possibly none on this rank."""

    rows: list[Row]
    batch: Batch
    demo: bool
    last: bool
    """Whether it is the last one of its rows."""


_kind = operator.attrgetter("kind")
Unit = Sequence[Row]  # consecutive rows that are never split


@dataclass(frozen=True)
class MicroBatches:
    """Options for splitting a rank's rows of one kind into micro-batches."""

    rows: int | None = None
    """Rows per micro-batch if `tokens` is None; None: all."""
    tokens: int | None = None
    """Tokens per micro-batch, including padding unless the rows are packed. A unit with more tokens
    is a micro-batch of its own."""
    packed: bool = False
    """Concatenate the rows instead of padding them; requires `tokens`."""
    unit: int = 1
    """Number of consecutive rows that are never split across micro-batches."""

    def batches(
        self, rows: Sequence[Row], pad_token: int, device: torch.device
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of `rows`, each of rows of one kind.

        Every rank gets the same sequence of demonstration and rollout micro-batches, some of them
        empty, because each forward of the policy or the reference may be a collective.
        """
        kinds: dict[bool, list[list[Row]]] = {False: [], True: []}
        for (demo, *_), group in itertools.groupby(sorted(rows, key=_kind), _kind):
            kinds[demo].append(list(group))
        splits = {demo: [*itertools.chain(*map(self.split, kinds[demo]))] for demo in kinds}
        counts = collectives.largest([len(parts) for parts in splits.values()])
        parts: list[tuple[bool, list[Row]]] = []
        for (demo, own), count in zip(splits.items(), map(int, counts), strict=True):
            if len(kinds[demo]) == 1:
                # smaller micro-batches instead of empty ones
                own = self.split(kinds[demo][0], count)
            parts += [(demo, part) for part in own + [[]] * (count - len(own))]
        for number, (demo, part) in enumerate(parts, 1):
            batch = collate(part, pad_token, device, self.packed)
            yield MicroBatch(part, batch, demo, number == len(parts))

    def split(self, rows: Sequence[Row], min_count: int = 1) -> list[list[Row]]:
        """Split `rows` into micro-batches.

        min_count: with packing, the minimum number of micro-batches, if there are enough units.
        """
        if self.tokens is None:
            size = max(self.rows // self.unit, 1) * self.unit if self.rows else max(len(rows), 1)
            return [list(rows[i : i + size]) for i in range(0, len(rows), size)]
        units = [rows[i : i + self.unit] for i in range(0, len(rows), self.unit)]
        parts = self._pack(units, min_count) if self.packed else self._fill(units)
        return [[row for unit in part for row in unit] for part in parts]

    def _cost(self, unit: Unit) -> int:
        """Tokens of a unit; one that exceeds the budget uses it up, so that it stays alone."""
        assert self.tokens is not None
        lengths = [len(row.ids) for row in unit]
        return min(sum(lengths) if self.packed else len(lengths) * max(lengths), self.tokens)

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


def assign_rows(rows: Sequence[Row], ranks: int, together: int = 1) -> list[list[Row]]:
    """Assign `rows` to ranks, keeping their order. Deterministic, so all ranks get the same result.

    Greedy: longest first, each to the rank with the fewest tokens in the row's group; ties are
    broken by total tokens. A group contains the rows that may share a forward: rows of one kind,
    either all with or all without a gradient.

    together: number of consecutive rows of one kind that must stay on one rank.
    """
    kinds: dict[tuple, list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault(row.kind, []).append(i)
    units = [k[i : i + together] for k in kinds.values() for i in range(0, len(k), together)]
    groups: dict[tuple, list[tuple[int, list[int]]]] = {}
    for unit in units:
        first = rows[unit[0]]
        group = (*first.kind, first.is_demo or first.advantage != 0)
        groups.setdefault(group, []).append((sum(len(rows[i].ids) for i in unit), unit))
    owner, total = [0] * len(rows), [0] * ranks
    for sized in groups.values():
        load = [0] * ranks
        for tokens, unit in sorted(sized, key=lambda u: -u[0]):
            chosen = min(range(ranks), key=lambda r: (load[r], total[r]))
            load[chosen] += tokens
            total[chosen] += tokens
            for i in unit:
                owner[i] = chosen
    return [[row for row, r in zip(rows, owner, strict=True) if r == rank] for rank in range(ranks)]


def rebalance(rows: Sequence[Row], together: int) -> list[Row]:
    """Exchange rows between ranks; return this rank's rows, renumbered. Call it on every rank."""
    # token ids are unpacked only by the rank that trains on them
    compact = [row._replace(ids=_packed(row.ids)) for row in rows]
    all_rows = [row for part in collectives.gather(compact) for row in part]
    own = assign_rows(all_rows, collectives.world_size(), together)[collectives.rank()]
    return [row._replace(ids=tuple(row.ids), sequence=i) for i, row in enumerate(own)]


def _packed(ids: tuple[int, ...]) -> Any:
    """Convert `ids` to an array of the same length that is pickled as bytes."""
    return array("i", ids)
