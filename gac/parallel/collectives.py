"""Collectives over the ranks of a run: all gathers, sums, means and maxima are here.

Numbers use the CPU backend if the process group has one, to avoid waiting for the GPU.
Call every function on every rank. Without a process group, each returns the local value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gac.errors import UserError

Result = TypeVar("Result")


def rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    """The world size; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """Every rank's `value`, any object that can be pickled, in rank order; also a barrier."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * ranks()
    dist.all_gather_object(everyone, value)
    return everyone


def together(work: Callable[[], Result]) -> Result:
    """Run `work()` on every rank; if it raises a UserError on one, all ranks raise it."""
    result, fault = None, None
    try:
        result = work()
    except UserError as error:
        fault = error
    faults = [f for f in gather(fault) if f]
    if faults:
        raise fault or faults[0]
    return cast(Result, result)


def total(values: Sequence[float]) -> list[float]:
    """Element-wise sum over ranks, in float64 and in rank order, so all ranks get the same bits."""
    return [sum(column) for column in zip(*_table(values), strict=True)]


def mean(values: Sequence[float]) -> list[float]:
    """Element-wise mean over ranks."""
    return [value / ranks() for value in total(values)]


def largest(values: Sequence[float]) -> list[float]:
    """Element-wise maximum over ranks."""
    return [max(column) for column in zip(*_table(values), strict=True)]


def add(tensor: Tensor) -> Tensor:
    """Sum `tensor` over ranks, in place; returns it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def _table(values: Sequence[float]) -> list[list[float]]:
    """Every rank's values, as [R][len(values)]."""
    if ranks() == 1:
        return [list(map(float, values))]
    mine = torch.tensor(values, dtype=torch.float64)
    cpu = "cpu:" in str(dist.get_backend_config())
    mine = mine if cpu else mine.cuda()
    rows = [torch.empty_like(mine) for _ in range(ranks())]
    dist.all_gather(rows, mine)
    return torch.stack(rows).tolist()
