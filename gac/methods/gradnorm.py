"""GradNorm: learned weights that balance the two weighted gradient norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import GradNormState, Gram, Weights, gradnorm_step
from gac.control.term_pair import TermPair

from .base import Mix, Observation, State
from .gram_solver import GramSolver
from .loss_weights import positive_losses


@dataclass(frozen=True)
class GradNorm(GramSolver):
    """Learned weights that give each weighted gradient a target norm, larger if its loss fell less.

    With `asymmetry` 0 the norms are made equal. Otherwise the term whose loss fell less gets a
    larger weight; for RL the loss is 1 - mean reward.
    """

    name: ClassVar[str] = "gradnorm"
    source: ClassVar[str] = "arXiv 1711.02257"

    asymmetry: float = 1.5
    """The publication's alpha."""
    lr: float = 0.025
    """Step size of a weight, in units of its gradient norm over the mean norm."""

    def init(self) -> State:
        return {**super().init(), "weights": [1.0, 1.0], "initial": None, "losses": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        losses = positive_losses(last)
        return super().mix({**state, "losses": losses and list(losses)}, last)

    def weights(self, state: State, gram: Gram) -> tuple[State, Weights | None]:
        losses = None if state["losses"] is None else TermPair(*state["losses"])
        asymmetry = self.asymmetry if losses is not None else 0.0
        initial = state["initial"]
        before = GradNormState(tuple(state["weights"]), None if initial is None else tuple(initial))
        weights, after = gradnorm_step(before, gram, losses, asymmetry=asymmetry, lr=self.lr)
        initial = after.initial_losses
        new = {"weights": list(after.weights), "initial": initial and list(initial)}
        return {**state, **new}, weights
