"""Constant mu: the fixed mixture that most trainers offer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac.errors import require
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State


@dataclass(frozen=True)
class Constant(Method):
    """The same mu at every step; the paper's QCM is mu = 0.58."""

    name: ClassVar[str] = "constant"
    family: ClassVar[str] = "schedule"
    source: ClassVar[str] = "the paper, appendix K (QCM)"

    mu: float = 0.58
    """Weight of the demonstrations, in [0, 1]."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def __post_init__(self) -> None:
        require(0 <= self.mu <= 1, "mu", self.mu, "a number in [0, 1]")

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight))

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(self.mu)
