"""Constant mu: the fixed mixture that most trainers offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require

from .base import Mix, Observation, State, TokenWeighted


@dataclass(frozen=True)
class Constant(TokenWeighted):
    """The same mu at every step; the paper's QCM is mu = 0.58."""

    name: ClassVar[str] = "constant"
    family: ClassVar[str] = "schedule"
    source: ClassVar[str] = "the paper, appendix K (QCM)"

    mu: float = 0.58
    """Weight of the demonstrations, in [0, 1]."""

    def __post_init__(self) -> None:
        require(0 <= self.mu <= 1, "mu", self.mu, "a number in [0, 1]")

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(self.mu)
