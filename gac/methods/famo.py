"""FAMO: losses fall at equal relative rates, measured on one batch before and after the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import FAMOState, famo_step, famo_weights
from gac.control.term_pair import TermPair

from .base import Mix, Observation, State, StepNeeds
from .loss_weights import LossWeights, from_plain, to_plain


@dataclass(frozen=True)
class FAMO(LossWeights):
    """Learned weights that make the logarithms of both losses fall at the same rate.

    The RL loss is the surrogate minus a lower bound, and the weights of a step use the losses of
    the previous step. `rollout_floor` must be a valid bound for the run's advantages: with K
    rollouts per prompt, advantages that are divided by the group's standard deviation reach sqrt(K
    - 1) in magnitude, and clipping allows 1.2 times that.
    """

    name: ClassVar[str] = "famo"
    source: ClassVar[str] = "arXiv 2306.03792"
    cost: ClassVar[str] = "forward pass over every row before and after the update"

    lr: float = 0.025
    """Step size of the logits (Adam)."""
    decay: float = 1e-3
    """Weight decay of the logits."""
    rollout_floor: float = -3.2
    """Lower bound of the RL loss; losses below it are raised to it. The default is for K = 8."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(losses_after=True)

    def init(self) -> State:
        return {"famo": to_plain(FAMOState()), "losses": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        famo = from_plain(FAMOState, state["famo"])
        if last.losses_before is not None and last.losses_after is not None:
            before, after = self._bounded(last.losses_before), self._bounded(last.losses_after)
            new = famo_step(famo, before, after, self._floors, lr=self.lr, decay=self.decay)
            if new is not None:
                famo, state = new, {"famo": to_plain(new), "losses": list(last.losses_before)}
        if state["losses"] is None:
            return state, Mix(0.5)
        losses = self._bounded(TermPair(*state["losses"]))
        weights = famo_weights(famo, losses, self._floors)
        assert weights is not None  # the losses of the state are finite
        return state, Mix.weights(*weights)

    @property
    def _floors(self) -> TermPair:
        return TermPair(0.0, self.rollout_floor)

    def _bounded(self, losses: TermPair) -> TermPair:
        return TermPair(*map(max, losses, self._floors))
