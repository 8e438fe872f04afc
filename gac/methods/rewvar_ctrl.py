"""RewVar-ctrl: mu is inversely proportional to the variance of the rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Observation
from .rules import Rule

EPSILON = 1e-6  # squared reward; avoids division by zero when all rewards are equal


@dataclass(frozen=True)
class RewardVarianceControl(Rule):
    """mu = c / Var(R) over the batch's rewards; with sign -1, mu = c Var(R)."""

    name: ClassVar[str] = "rewvar-ctrl"

    def measured(self, last: Observation) -> float | None:
        return last.reward_variance

    def constant(self, mean: float) -> float:
        scale = max(mean, 0.0) + EPSILON
        return self.mu_init * scale if self.sign == 1 else self.mu_init / scale

    def rule(self, value: float, constant: float) -> float:
        scale = max(value, 0.0) + EPSILON
        return constant / scale if self.sign == 1 else constant * scale
