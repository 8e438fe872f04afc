"""Base class of rules, which compute mu from one measured quantity and a calibrated constant.

The paper does not give the constants. Here the first steps use a fixed mu, and the constant is
chosen so that the rule gives this mu at the mean measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require

from .base import Mix, Observation, State, TokenWeighted


@dataclass(frozen=True)
class Rule(TokenWeighted):
    """A method whose mu is a function of one quantity measured during training."""

    family: ClassVar[str] = "rule"
    source: ClassVar[str] = "the paper, appendix I (rule-based controllers)"

    sign: int = 1
    """1: the printed rule; -1: the opposite direction."""
    calibration: int = 50
    """Steps at `mu_init` used to calibrate the rule's constant."""
    mu_init: float = 0.58
    """mu during calibration, and the rule's value at the mean measurement."""
    mu_min: float = 0.02
    """Smallest mu afterwards."""
    mu_max: float = 0.98
    """Largest mu afterwards."""

    def __post_init__(self) -> None:
        require(self.sign in (1, -1), "sign", self.sign, "1 or -1")
        require(self.calibration >= 1, "calibration", self.calibration, "a number >= 1")
        if not 0 <= self.mu_min <= self.mu_init <= self.mu_max <= 1:
            raise ValueError(
                f"mu_min={self.mu_min!r}, mu_init={self.mu_init!r}, mu_max={self.mu_max!r}: "
                "use 0 <= mu_min <= mu_init <= mu_max <= 1"
            )

    def measured(self, last: Observation) -> float | None:
        """The measured quantity that drives the rule; None if not measured."""
        raise NotImplementedError

    def constant(self, mean: float) -> float:
        """The constant for which `rule(mean, constant)` equals `mu_init`."""
        raise NotImplementedError

    def rule(self, value: float, constant: float) -> float:
        """mu before clipping to [mu_min, mu_max]."""
        raise NotImplementedError

    def init(self) -> State:
        return {"sum": 0.0, "count": 0, "mu": self.mu_init}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        value = self.measured(last)
        if value is None or not math.isfinite(value):
            return state, Mix(state["mu"])
        if state["count"] < self.calibration:
            new = {"sum": state["sum"] + value, "count": state["count"] + 1, "mu": self.mu_init}
            return new, Mix(self.mu_init)
        constant = self.constant(state["sum"] / state["count"])
        mu = min(max(self.rule(value, constant), self.mu_min), self.mu_max)
        return {**state, "mu": mu}, Mix(mu)
