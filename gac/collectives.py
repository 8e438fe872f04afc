"""Collectives over the ranks of a run: gather, sum, mean and maximum.

Numbers use the CPU backend if the process group has one, to avoid waiting for the GPU.
Call every function on every rank. Without a process group, each returns the local value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from gac.errors import UserError

Result = TypeVar("Result")


def rank() -> int:
    """The rank of this process; 0 without a process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """The world size; 1 without a process group."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """Gather every rank's `value` (pickled) in rank order; also a barrier."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def run_on_all_ranks(
    work: Callable[[], Result], explain: Callable[[Exception], UserError] | None = None
) -> Result:
    """Run `work()` on every rank; if it raises a UserError on any of them, all ranks raise one.

    explain: turns other errors into a UserError, or raises them; None: they are bugs.
    """
    result = own_error = cause = None
    try:
        result = work()
    except UserError as error:
        own_error = error
    except Exception as error:  # the other ranks must hear of any error
        if explain is None:
            raise
        own_error, cause = explain(error), error
    errors = [error for error in gather(own_error) if error]
    if errors:
        raise own_error or errors[0] from cause
    return cast(Result, result)


def total(values: Sequence[float]) -> list[float]:
    """Element-wise sum over ranks, in float64 and in rank order, so all ranks get the same bits."""
    return [sum(column) for column in zip(*_table(values), strict=True)]


def mean(values: Sequence[float]) -> list[float]:
    """Element-wise mean over ranks."""
    return [value / world_size() for value in total(values)]


Sums = dict[str, tuple[float, int]]
"""Metrics column -> sum and number of its values; or its largest value, >= 0, and MAXIMUM."""
MAXIMUM = -1


def add_sums(totals: Sums, more: Mapping[str, tuple[float, int]]) -> None:
    """Add `more` to `totals` in place."""
    for name, (value, number) in more.items():
        before, own = totals.get(name, (0.0, 0))
        largest = max(before, value), MAXIMUM
        totals[name] = largest if number == MAXIMUM else (before + value, own + number)


def columns(means: Sums, counts: Mapping[str, int]) -> dict[str, float]:
    """Means and maxima, then summed counts, over all ranks; some may lack a name."""
    totals: Sums = {}
    counted: Counter[str] = Counter()
    for own_sums, own_counts in gather((means, counts)):
        add_sums(totals, own_sums)
        counted.update(own_counts)
    return {**{name: value / abs(n) for name, (value, n) in sorted(totals.items()) if n}, **counted}


def largest(values: Sequence[float]) -> list[float]:
    """Element-wise maximum over ranks."""
    return [max(column) for column in zip(*_table(values), strict=True)]


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum `tensor` over ranks, in place; returns it."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(tensor)
    return tensor


def _table(values: Sequence[float]) -> list[list[float]]:
    """Every rank's values, as [R][len(values)]."""
    if world_size() == 1:
        return [list(map(float, values))]
    row = torch.tensor(values, dtype=torch.float64)
    has_cpu_backend = "cpu:" in str(torch.distributed.get_backend_config())
    row = row if has_cpu_backend else row.cuda()
    rows = [torch.empty_like(row) for _ in range(world_size())]
    torch.distributed.all_gather(rows, row)
    return torch.stack(rows).tolist()
