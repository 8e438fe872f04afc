"""DWA: gives more weight to the term whose loss falls more slowly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.checks import is_count, is_real, require

from .base import Mix, Observation, State
from .loss_weights import EPSILON, LossWeights, positive_losses, softmax


@dataclass(frozen=True)
class DWA(LossWeights):
    """Softmax weights from the ratio of each loss's last two window means, newer over older.

    w_i = 2 softmax(newer / older / temperature); 1 until two windows are complete.
    """

    name: ClassVar[str] = "dwa"
    source: ClassVar[str] = "arXiv 1803.10704"

    temperature: float = 2.0
    """Softmax temperature, > 0; the paper tries 1, 2 and 4."""
    window: int = 25
    """Number of steps per window; the publication uses an epoch."""

    def __post_init__(self) -> None:
        ok = is_real(self.temperature) and self.temperature > 0
        require(ok, "temperature", self.temperature, "a number > 0")
        require(is_count(self.window, 1), "window", self.window, "an integer >= 1")

    def init(self) -> State:
        return {"sums": [0.0, 0.0], "steps": 0, "newer": None, "older": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        losses = positive_losses(last)
        if losses is not None:
            steps = state["steps"] + 1
            sums = [total + loss for total, loss in zip(state["sums"], losses, strict=True)]
            state = {**state, "sums": sums, "steps": steps}
            if steps >= self.window:
                means = [total / steps for total in sums]
                state = {**self.init(), "newer": means, "older": state["newer"]}
        if state["older"] is None:
            return state, Mix.weights(1.0, 1.0)
        s, r = (
            (new + EPSILON) / (old + EPSILON) / self.temperature
            for new, old in zip(state["newer"], state["older"], strict=True)
        )
        share = softmax(s, r)
        return state, Mix.weights(2 * share[0], 2 * share[1])
