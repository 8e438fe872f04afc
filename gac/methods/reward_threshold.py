"""CHORD's adaptive mu: demonstrations until the rewards are good enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Mix, Observation, State, TokenWeighted


@dataclass(frozen=True)
class RewardThreshold(TokenWeighted):
    """mu = threshold - mean reward of the previous step, clipped to [0, 1]."""

    name: ClassVar[str] = "reward-threshold"
    family: ClassVar[str] = "rule"
    source: ClassVar[str] = "arXiv 2508.11408, appendix B.1"

    threshold: float = 0.5
    """Mean reward at or above which demonstrations get no weight; the publication tries 0.5 and
    0.7.
    """

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(min(max(self.threshold - (last.reward_mean or 0.0), 0.0), 1.0))
