"""Demonstrations that are exchanged for others in the middle of a run.

A deployment's demonstrations may go stale, or good ones may arrive late; an experiment on it needs
the change at a known step, the same on every rank and after every resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .order import Order


@dataclass(frozen=True)
class DemoShift:
    """From optimiser step `step` on, demonstrations come from `demos`."""

    step: int
    """The first step, from 0, that reads the new set; > 0."""
    demos: str
    """Source of the new set, read like the first one."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step={self.step!r}: use a number >= 1; `demos` is the first set")


def check_shifts(shifts: Sequence[DemoShift]) -> None:
    """Raise ValueError unless every shift comes after the one before it."""
    steps = [shift.step for shift in shifts]
    if steps != sorted(set(steps)):
        raise ValueError(f"demo_shifts: steps {steps} must rise from one shift to the next")


class ShiftingOrder:
    """Which set a step reads, and which of its rows: an `Order` for each set.

    Args:
        starts: the first step of each set, rising; the first is 0.
        sizes: rows of each set.
    """

    def __init__(self, starts: Sequence[int], sizes: Sequence[int], seed: int) -> None:
        self.starts = list(starts)
        self.orders = [Order(size, seed) for size in sizes]

    def take(self, step: int, k: int) -> list[tuple[int, int]]:
        """(set, row) of the next `k` demonstrations; steps must not go back."""
        number = max(i for i, start in enumerate(self.starts) if start <= step)
        return [(number, row) for row in self.orders[number].take(k)]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types: the first set's order, and those of the later ones."""
        first, *later = (order.state_dict() for order in self.orders)
        return {**first, "later": later} if later else first

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            ValueError: it belongs to other sets.
        """
        states = [state, *state.get("later", [])]
        if len(states) != len(self.orders):
            raise ValueError(
                f"demo_shifts: {len(self.orders)} sets of demonstrations here and {len(states)} in "
                "the saved order: resume with the same data, or start a new run"
            )
        for order, one in zip(self.orders, states, strict=True):
            order.load_state_dict(dict(one))
