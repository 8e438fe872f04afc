"""Uncertainty weighting: learned inverse-loss weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import uncertainty_step, uncertainty_weights

from .base import Mix, Observation, State
from .loss_weights import LossWeights, positive_losses


@dataclass(frozen=True)
class Uncertainty(LossWeights):
    """Weights exp(-s) / 2 with learned log-variances s, whose fixed point is exp(s) = loss."""

    name: ClassVar[str] = "uncertainty"
    source: ClassVar[str] = "arXiv 1705.07115"

    lr: float = 0.025
    """Step size of s."""

    def init(self) -> State:
        return {"log_variances": [0.0, 0.0]}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        s, r = state["log_variances"]
        losses = positive_losses(last)
        after = None if losses is None else uncertainty_step((s, r), losses, lr=self.lr)
        s, r = after or (s, r)
        return {"log_variances": [s, r]}, Mix.weights(*uncertainty_weights((s, r)))
