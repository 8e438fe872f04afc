"""Counts instructions per logit in a kernel's machine code, in the loops over a row.

The machine code is disassembled by `nvdisasm -c`. Of the control-flow cycles through a block of
exponentials, a pass is the one with the fewest instructions per logit; rare paths (a new maximum,
the edge of a row, a barrier that is not ready) are not on that cycle and are not counted. The
logits of a pass are its exponentials or, if it stores a gradient, what it stores: a compiler may
compute an exponential twice.
"""

from __future__ import annotations

import functools
import heapq
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from gac_kernels.inspect import Report

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([\w.]+)([^;]*);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
# a loop handles a multiple of this many logits per iteration; other exponentials rescale sums
_GROUP = 4
_MAX_LOGITS = 64  # per loop iteration
# LDGSTS copies to shared memory asynchronously
_WIDE_LOAD = r"\bLDG(?:STS)?\.E\S*\.128|\b(?:global|buffer)_load_dwordx4"
_WIDE_STORE = r"\bSTG\.E\S*\.128|\b(?:global|buffer)_store_dwordx4"


class Block(NamedTuple):
    """A basic block: instructions that run in sequence."""

    instructions: int
    powers: int
    """Number of exponentials of logits; these are unconditional and come in groups."""
    stores: int
    """Bits per thread of the unconditional stores to global memory."""
    next: tuple[int, ...]
    """Blocks that can follow."""


class Passes(NamedTuple):
    """Instructions per thread and logit in the hot loops; nan if there is no such loop."""

    sums: float
    gradient: float


def per_logit(report: Report) -> Passes:
    """The instructions of a compiled row kernel's passes; a softcap takes a second exponential."""
    dtype = re.findall(r"bfloat16|float16|float32", report.config)[-1:]
    sums, gradient = passes(assembly(report), 32 if dtype == ["float32"] else 16)
    return Passes(2 * sums if "softcap" in report.config else sums, gradient)


def assembly(report: Report) -> str:
    """The machine code of a compiled kernel as text."""
    if report.arch.startswith("gfx"):
        return report.code.decode()
    return _functions(report.code)[report.symbol]


@functools.lru_cache(maxsize=1)
def _functions(cubin: bytes) -> dict[str, str]:
    """The disassembled functions by name."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    functions = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)
    return dict(zip(functions[1::2], functions[2::2], strict=True))


def wide_accesses(report: Report) -> tuple[int, int]:
    """Numbers of global loads and of global stores of 16 bytes per thread."""
    code = assembly(report)
    return len(re.findall(_WIDE_LOAD, code)), len(re.findall(_WIDE_STORE, code))


def passes(sass: str, bits: int = 32) -> Passes:
    """Instructions per exponential of the pass that computes sums, and per stored value of `bits`
    bits of the pass that computes the gradient.

    If a loop exists with and without an entropy bonus, the cheaper version is counted.
    """
    blocks = control_flow(sass)
    starts = [i for i, block in enumerate(blocks) if block.powers]
    sums = (cost / powers for i in starts for cost, powers, _ in _cycles(blocks, i, False))
    loops = (loop for i in starts for loop in _cycles(blocks, i, True))
    gradient = (cost * bits / stored for cost, _, stored in loops)
    return Passes(min(sums, default=math.nan), min(gradient, default=math.nan))


def _cycles(blocks: list[Block], start: int, stores: bool) -> Iterator[tuple[int, int, int]]:
    """The instructions, exponentials and stored bits of the loops through block `start`."""
    first = blocks[start]
    if first.stores and not stores:
        return
    heap = [(first.instructions, start, first.powers, first.stores)]
    seen: set[tuple[int, int, bool]] = set()
    while heap:
        cost, at, powers, stored = heapq.heappop(heap)
        if (at, powers, stored > 0) in seen or powers > _MAX_LOGITS:
            continue
        seen.add((at, powers, stored > 0))
        for following in blocks[at].next:
            block = blocks[following]
            if following == start and (stored > 0) == stores:
                yield cost, powers, stored
            if stores or not block.stores:
                state = (following, powers + block.powers, stored + block.stores)
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
        elif match := _INSTRUCTION.match(line):
            runs[-1].append((match[1] or "", match[2], match[3]))
            if match[2].split(".")[0] in ("BRA", "EXIT", "RET", "BRX"):
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
        unconditional = not predicate and "P" not in operands.split("`")[0] and ".DIV" not in name
        if kind in ("BRA", "EXIT", "RET") and unconditional:
            following = []
        if kind == "BRA" and target and target[1] in labels:
            following.append(labels[target[1]])
    names = [name for _, name, _ in run]
    powers = sum(name == "MUFU.EX2" and not predicate for predicate, name, _ in run)
    return Block(
        instructions=sum(name != "NOP" for name in names),
        powers=powers - powers % _GROUP,
        stores=sum(
            int(re.sub(r"\D", "", name.split(".")[-1]) or 32)
            for predicate, name, _ in run
            if name.startswith("STG") and not predicate
        ),
        next=tuple(following),
    )
