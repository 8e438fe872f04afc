"""What the ranks of a run tell each other: the only gather, sum, mean and maximum over processes.

Numbers travel by the CPU's backend where the process group has one, so that they wait for no GPU.
Every rank makes every call. Without a process group, each call returns this process's own.
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
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """Every rank's `value`, any object that can be pickled, in rank order; also a barrier."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * ranks()
    dist.all_gather_object(everyone, value)
    return everyone


def together(work: Callable[[], Result]) -> Result:
    """`work()`, done by every rank; if it fails on one, with what a user can mend, all raise it."""
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
    """The sum of each number over the ranks, in float64 and rank order, so the same on all."""
    return [sum(column) for column in zip(*_table(values), strict=True)]


def mean(values: Sequence[float]) -> list[float]:
    """The mean of each number over the ranks."""
    return [value / ranks() for value in total(values)]


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each number over the ranks."""
    return [max(column) for column in zip(*_table(values), strict=True)]


def add(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over the ranks, which may be written into it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def _table(values: Sequence[float]) -> list[list[float]]:
    """[R][len(values)]: each rank's numbers."""
    if ranks() == 1:
        return [list(map(float, values))]
    mine = torch.tensor(values, dtype=torch.float64)
    cpu = "cpu:" in str(dist.get_backend_config())
    mine = mine if cpu else mine.cuda()
    rows = [torch.empty_like(mine) for _ in range(ranks())]
    dist.all_gather(rows, mine)
    return torch.stack(rows).tolist()
