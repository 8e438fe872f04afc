"""GradNorm: learned weights that balance the two weighted gradient norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.control.checks import is_real, require

from .base import Mix, Observation, State, Weights
from .gram_solver import Gram, GramSolver, check_nonnegative
from .loss_weights import positive_losses

MIN_WEIGHT = 1e-3  # lower bound of the weights: a weight of 0 could never recover


@dataclass(frozen=True)
class GradNorm(GramSolver):
    """Learned weights that give each weighted gradient a target norm, larger if its loss fell less.

    The weights w, whose sum is 2, move towards w_i |g_i| = mean(w |g|) r_i^asymmetry, where r_i is
    the relative loss L_i / L_i(0) over its mean; for RL the loss is 1 - mean reward. The update
    uses only the sign of the error, so mu jitters by about `lr`.
    """

    name: ClassVar[str] = "gradnorm"
    source: ClassVar[str] = "arXiv 1711.02257"

    asymmetry: float = 1.5
    """The publication's alpha; 0 makes the norms equal."""
    lr: float = 0.025
    """Step size of a weight, in units of its gradient norm over the mean norm."""

    def __post_init__(self) -> None:
        check_nonnegative(self, "lr")
        require(is_real(self.asymmetry), "asymmetry", self.asymmetry, "a finite number")

    def init(self) -> State:
        return {**super().init(), "weights": [1.0, 1.0], "initial": None, "losses": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        losses = positive_losses(last)
        return super().mix({**state, "losses": losses and list(losses)}, last)

    def weights(self, state: State, gram: Gram) -> tuple[State, Weights | None]:
        rates, losses = (1.0, 1.0), state["losses"]
        if losses is not None and self.asymmetry != 0:
            state = {**state, "initial": state["initial"] or losses}
            s, r = (now / first for now, first in zip(losses, state["initial"], strict=True))
            rates = (2 * s / (s + r)) ** self.asymmetry, (2 * r / (s + r)) ** self.asymmetry
        if gram.sft == gram.rl == 0:
            return state, None
        norms = math.sqrt(gram.sft), math.sqrt(gram.rl)
        weighted = [w * norm for w, norm in zip(state["weights"], norms, strict=True)]
        mean = 0.5 * sum(weighted)
        s, r = (
            max(w - self.lr * _sign(size - mean * rate) * norm / mean, MIN_WEIGHT)
            for w, size, rate, norm in zip(state["weights"], weighted, rates, norms, strict=True)
        )
        weights = 2 * s / (s + r), 2 * r / (s + r)
        return {**state, "weights": list(weights)}, weights


def _sign(value: float) -> float:
    return float(value > 0) - float(value < 0)
