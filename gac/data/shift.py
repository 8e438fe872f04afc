"""Switches the demonstration set in the middle of a run.

In deployment, demonstrations may become outdated, or good ones may arrive late. An experiment needs
this change at a known step, the same on every rank and after every resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .order import Order


@dataclass(frozen=True)
class DemoShift:
    """From optimizer step `step` on, demonstrations come from `demos`."""

    step: int
    """The first step (from 0) that uses the new set; must be > 0."""
    demos: str
    """Source of the new set, read like the first one. With a method that trains on the
    demonstrations of the sampled prompts: `data.prompts` with other demonstrations."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step={self.step!r}: use a number >= 1; step 0 uses data.demos")


def check_shifts(shifts: Sequence[DemoShift]) -> None:
    """Raise ValueError unless the steps are strictly increasing."""
    steps = [shift.step for shift in shifts]
    if steps != sorted(set(steps)):
        raise ValueError(f"demo_shifts: steps {steps} must be strictly increasing")


def set_at(step: int, starts: Sequence[int]) -> int:
    """Index of the demonstration set that is used in `step`; set i is used from `starts[i]` on."""
    return max(i for i, start in enumerate(starts) if start <= step)


class ShiftingOrder:
    """Selects a step's demonstration set and draws rows from it; each set has its own `Order`.

    Args:
        starts: the first step of each set, increasing; the first is 0.
        sizes: number of rows in each set.
    """

    def __init__(self, starts: Sequence[int], sizes: Sequence[int], seed: int) -> None:
        self.starts = list(starts)
        self.orders = [Order(size, seed) for size in sizes]

    def take(self, step: int, k: int) -> list[tuple[int, int]]:
        """(set, row) of the next `k` demonstrations; `step` must not decrease."""
        index = set_at(step, self.starts)
        return [(index, row) for row in self.orders[index].take(k)]

    def state_dict(self) -> dict[str, Any]:
        """State in plain JSON types: the first set's order; `later` lists the others' orders."""
        first, *later = (order.state_dict() for order in self.orders)
        return {**first, "later": later} if later else first

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`.

        Raises:
            ValueError: the state belongs to other sets.
        """
        states = [state, *state.get("later", [])]
        if len(states) != len(self.orders):
            raise ValueError(
                f"demo_shifts: this run has {len(self.orders)} sets of demonstrations and the "
                f"saved order has {len(states)}: resume with the same data, or start a new run"
            )
        for order, order_state in zip(self.orders, states, strict=True):
            order.load_state_dict(dict(order_state))
