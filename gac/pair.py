"""The two objectives of a mixed loss, always in one order."""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """One number for each objective: a loss, a weight, a divisor."""

    demo: float
    """Of the demonstration term (SFT)."""
    rollout: float
    """Of the rollout term (RL)."""
