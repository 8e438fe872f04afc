"""FAMO: equalizes the rates of descent, using the losses of one batch before and after the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gac.control.signals import Reading
from gac.control.solvers import FAMOState, famo_step, famo_weights
from gac.control.term_pair import Pair

from .base import Mix, Needs, Observation, Outcome, State
from .loss_weights import LossWeights


@dataclass(frozen=True)
class FAMO(LossWeights):
    """Learned weights that make the logarithms of both losses fall at the same rate.

    The RL loss is the surrogate minus a lower bound, and the weights of a step use the losses of
    the previous step. `rollout_floor` must be a valid bound for the run's advantages: divided by
    the group's standard deviation, those of K rollouts reach sqrt(K - 1) in magnitude, and clipping
    allows 1.2 times that.
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

    def needs(self, step: int) -> Needs:
        return Needs(losses_after=True)

    def init(self) -> State:
        return {"famo": _plain(FAMOState()), "losses": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        if state["losses"] is None:
            return state, Mix(0.5)
        found = famo_weights(
            _restore(state["famo"]), self._bounded(Pair(*state["losses"])), self._floors
        )
        return state, Mix(0.5) if found is None else Mix.weights(*found)

    def after_step(self, state: State, outcome: Outcome) -> tuple[State, Reading | None]:
        if outcome.after is None:
            return state, None
        before, after = self._bounded(outcome.before), self._bounded(outcome.after)
        moved = famo_step(
            _restore(state["famo"]), before, after, self._floors, lr=self.lr, decay=self.decay
        )
        if moved is None:
            return state, None
        return {"famo": _plain(moved), "losses": list(outcome.before)}, None

    @property
    def _floors(self) -> Pair:
        return Pair(0.0, self.rollout_floor)

    def _bounded(self, losses: Pair) -> Pair:
        return Pair(*map(max, losses, self._floors))


def _restore(plain: State) -> FAMOState:
    known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    return FAMOState(**known)


def _plain(state: FAMOState) -> State:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in state._asdict().items()}
