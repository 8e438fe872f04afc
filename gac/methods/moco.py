"""MoCo: one projected step on the loss weights per update, computed from averaged gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require

from .base import Mix, Observation, State, StepNeeds, Weights
from .gram_solver import Gram, GramSolver, check_nonnegative


@dataclass(frozen=True)
class MoCo(GramSolver):
    """Each update moves the loss weights by one projected step; they weight average gradients.

    The averages y <- y + rate (g - y) also give the inner products, which are divided by their
    trace, so `lr` is dimensionless.
    """

    name: ClassVar[str] = "moco"
    source: ClassVar[str] = "Fernando et al., ICLR 2023 (OpenReview dLAYGdKTi2)"
    cost: ClassVar[str] = "four extra gradient buffers, two of them kept between steps"

    rate: float = 0.1
    """beta in (0, 1]: y <- y + beta (g - y)."""
    lr: float = 0.1
    """Step size of the weights, for inner products divided by their trace."""
    decay: float = 0.5
    """`rate` and `lr` decay as (step + 1)^-decay."""
    regularization: float = 0.0
    """rho >= 0, added to the diagonal of the Gram matrix."""

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, "rate", self.rate, "a number in (0, 1]")
        check_nonnegative(self, "lr", "decay", "regularization")

    def init(self) -> State:
        return {**super().init(), "weights": [0.5, 0.5], "step": 0}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return super().mix({**state, "step": last.step}, last)

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=1, average=self.rate * (step + 1) ** -self.decay)

    def weights(self, state: State, gram: Gram) -> tuple[State, Weights | None]:
        lr = self.lr * (state["step"] + 1) ** -self.decay
        a, b, c = gram.unit()
        trace, rho = (a + c) or 1.0, self.regularization
        s, r = state["weights"]
        v_s = s - lr * ((a / trace + rho) * s + b / trace * r)
        v_r = r - lr * (b / trace * s + (c / trace + rho) * r)
        share = min(max((v_s - v_r + 1) / 2, 0.0), 1.0)  # projection onto the simplex
        return {**state, "weights": [share, 1 - share]}, (share, 1 - share)
