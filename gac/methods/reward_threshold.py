"""CHORD's adaptive mu: demonstrations until the rewards are good enough."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State


@dataclass(frozen=True)
class RewardThreshold(Method):
    """mu = threshold - mean reward of the previous step, clipped to [0, 1]."""

    name: ClassVar[str] = "reward-threshold"
    family: ClassVar[str] = "rule"
    source: ClassVar[str] = "arXiv 2508.11408, appendix B.1"

    threshold: float = 0.5
    """Mean reward at or above which demonstrations get no weight; the publication tries 0.5 and
    0.7.
    """
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight))

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(min(max(self.threshold - (last.reward_mean or 0.0), 0.0), 1.0))
