"""A pair of values for the two terms of the mixed loss, in a fixed order."""

from __future__ import annotations

from typing import NamedTuple


class TermPair(NamedTuple):
    """One value per loss term, e.g. a loss, a weight or a divisor."""

    demo: float
    """Value of the demonstration term (SFT)."""
    rollout: float
    """Value of the rollout term (RL)."""
