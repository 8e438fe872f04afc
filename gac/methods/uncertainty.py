"""Uncertainty weighting: learned inverse-loss weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import Mix, Observation, State
from .gram_solver import check_nonnegative
from .loss_weights import LossWeights, positive_losses

BOUND = 6.0  # largest |s|, in case a loss reaches 0


@dataclass(frozen=True)
class Uncertainty(LossWeights):
    """Weights exp(-s) / 2 with learned log-variances s, whose fixed point is exp(s) = loss.

    Each step is one gradient step on s for the sum of exp(-s_i) L_i / 2 + s_i / 2.
    """

    name: ClassVar[str] = "uncertainty"
    source: ClassVar[str] = "arXiv 1705.07115"

    lr: float = 0.025
    """Step size of s."""

    def __post_init__(self) -> None:
        check_nonnegative(self, "lr")

    def init(self) -> State:
        return {"log_variances": [0.0, 0.0]}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        old, losses = state["log_variances"], positive_losses(last)
        if losses is not None:
            moved = (
                s - self.lr * 0.5 * (1 - math.exp(-s) * loss)
                for s, loss in zip(old, losses, strict=True)
            )
            old = [min(max(s, -BOUND), BOUND) for s in moved]
        weights = [0.5 * math.exp(-s) for s in old]
        return {"log_variances": old}, Mix.weights(*weights)
