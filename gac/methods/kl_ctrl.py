"""KL-ctrl: mu falls as the KL to the initial policy grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Observation, StepNeeds
from .rules import Rule

MIN_KL = 1e-6  # nats; lower bound of the mean KL, for a policy equal to the reference


@dataclass(frozen=True)
class KLControl(Rule):
    """mu = 1 - KL / kappa; with sign -1, mu = KL / kappa, the direction of GAC's own KL loop."""

    name: ClassVar[str] = "kl-ctrl"
    cost: ClassVar[str] = "reference forward pass on the rollouts"

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(kl=True)

    def measured(self, last: Observation) -> float | None:
        return last.kl

    def constant(self, mean: float) -> float:
        return max(mean, MIN_KL) / (1 - self.mu_init if self.sign == 1 else self.mu_init)

    def rule(self, value: float, constant: float) -> float:
        share = value / constant
        return 1 - share if self.sign == 1 else share
