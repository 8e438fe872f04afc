"""What a kernel's machine code costs per logit: the loops that pass over a row, counted.

The text is that of `nvdisasm -c`. A pass is the cheapest cycle of the control flow, per logit, that
goes through a block of exponentials; whatever is rare (a raised maximum, an edge of the row, a
barrier that is not ready) lies beside that cycle and is not counted.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([\w.]+)([^;]*);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_FEWEST = 4  # logits that a loop takes at a time, or a multiple: other exponentials scale sums
_MOST = 64  # logits that one turn of a loop may take


class Block(NamedTuple):
    """Instructions that run one after the other."""

    instructions: int
    powers: int
    """Exponentials of logits: unconditional, and several in a row."""
    stores: int
    """To global memory."""
    next: tuple[int, ...]
    """Blocks that can follow."""


class Passes(NamedTuple):
    """Instructions of a thread per logit in the hot loops; nan where there is no such loop."""

    sums: float
    gradient: float


def passes(sass: str) -> Passes:
    """Of a row kernel: the pass that only reads, and the pass that stores.

    Of a loop's heavier and lighter forms (with and without an entropy bonus) the lighter counts.
    """
    blocks = control_flow(sass)
    starts = [i for i, block in enumerate(blocks) if block.powers]
    return Passes(
        *(
            min((cost for i in starts for cost in _cycles(blocks, i, stores)), default=math.nan)
            for stores in (False, True)
        )
    )


def _cycles(blocks: list[Block], start: int, stores: bool) -> Iterator[float]:
    """Instructions per logit of the cheapest ways from `start` back to it."""
    first = blocks[start]
    if first.stores and not stores:
        return
    heap = [(first.instructions, start, first.powers, first.stores > 0)]
    seen: set[tuple[int, int, bool]] = set()
    while heap:
        cost, at, powers, stored = heapq.heappop(heap)
        if (at, powers, stored) in seen or powers > _MOST:
            continue
        seen.add((at, powers, stored))
        for following in blocks[at].next:
            block = blocks[following]
            if following == start and stored == stores:
                yield cost / powers
            if stores or not block.stores:
                state = (following, powers + block.powers, stored or block.stores > 0)
                heapq.heappush(heap, (cost + block.instructions, *state))


def control_flow(sass: str) -> list[Block]:
    """The basic blocks of one function, in order."""
    runs: list[list[tuple[str, str, str]]] = [[]]
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            if runs[-1]:
                runs.append([])
            labels[label[1]] = len(runs) - 1
        elif found := _INSTRUCTION.match(line):
            runs[-1].append((found[1] or "", found[2], found[3]))
            if found[2].split(".")[0] in ("BRA", "EXIT", "RET", "BRX"):
                runs.append([])
    return [_block(run, i, labels, len(runs)) for i, run in enumerate(runs)]


def _block(
    run: list[tuple[str, str, str]], number: int, labels: dict[str, int], count: int
) -> Block:
    following = [number + 1] if number + 1 < count else []
    if run:
        predicate, name, operands = run[-1]
        kind = name.split(".")[0]
        target = _TARGET.search(operands)
        # "BRA P1, `(.L)" has its condition among the operands
        sure = not predicate and "P" not in operands.split("`")[0] and ".DIV" not in name
        if kind in ("BRA", "EXIT", "RET") and sure:
            following = []
        if kind == "BRA" and target and target[1] in labels:
            following.append(labels[target[1]])
    names = [name for _, name, _ in run]
    powers = sum(name == "MUFU.EX2" and not predicate for predicate, name, _ in run)
    return Block(
        instructions=sum(name != "NOP" for name in names),
        powers=powers - powers % _FEWEST,
        stores=sum(name.startswith("STG") for name in names),
        next=tuple(following),
    )
