"""Balances a step's rows over the ranks, so that all train on similar numbers of tokens.

Prompts are assigned before the response lengths are known; without balancing, every step waits for
the rank with the longest responses. The assignment does not affect the results.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from gac.parallel import collectives

from .rows import Row


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
