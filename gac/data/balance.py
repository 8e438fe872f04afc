"""The rows of a step over the ranks of a run, so that each has about as many tokens to learn from.

Prompts are dealt out before anybody knows how long the responses will be; without this, every step
waits for the rank with the longest ones. Which rank computes a row changes no result.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from gac.parallel import collectives

from .rows import Row


def shares(rows: Sequence[Row], ranks: int, together: int = 1) -> list[list[Row]]:
    """Each rank's rows, in their order; the same on all ranks for the same `rows`.

    Longest first, each to the rank that has the fewest tokens of its sort, then of all sorts. Of a
    sort is what may share a forward: rows of one kind, with a gradient or without.
    together: so many neighbours of one kind stay neighbours.
    """
    kinds: dict[tuple, list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault(row.kind, []).append(i)
    units = [k[i : i + together] for k in kinds.values() for i in range(0, len(k), together)]
    sorts: dict[tuple, list[tuple[int, list[int]]]] = {}
    for unit in units:
        first = rows[unit[0]]
        sort = (*first.kind, first.is_demo or first.advantage != 0)
        sorts.setdefault(sort, []).append((sum(len(rows[i].ids) for i in unit), unit))
    owner, total = [0] * len(rows), [0] * ranks
    for sort in sorted(sorts):
        load = [0] * ranks
        for tokens, unit in sorted(sorts[sort], key=lambda u: (-u[0], u[1])):
            chosen = min(range(ranks), key=lambda r: (load[r], total[r], r))
            load[chosen] += tokens
            total[chosen] += tokens
            for i in unit:
                owner[i] = chosen
    return [[row for row, r in zip(rows, owner, strict=True) if r == rank] for rank in range(ranks)]


def exchanged(rows: Sequence[Row], together: int = 1) -> list[Row]:
    """This rank's share of the rows that all ranks have, numbered anew. Every rank calls it."""
    # numbers are unpacked by the rank that learns from them, not by all
    compact = [row._replace(ids=_packed(row.ids)) for row in rows]
    everyone = [row for found in collectives.gather(compact) for row in found]
    mine = shares(everyone, collectives.ranks(), together)[collectives.rank()]
    return [row._replace(ids=tuple(row.ids), sequence=i) for i, row in enumerate(mine)]


def _packed(ids: tuple[int, ...]) -> Any:
    """With the length of `ids`, and pickled as bytes."""
    return array("i", ids)
