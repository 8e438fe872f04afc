"""FAMO: losses fall at equal relative rates, measured on one batch before and after the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .base import Mix, Observation, State, StepNeeds, Weights
from .gram_solver import check_nonnegative
from .loss_weights import EPSILON, LossWeights, softmax


@dataclass(frozen=True)
class FAMO(LossWeights):
    """Learned weights that make the logarithms of both losses fall at the same rate.

    The weights are proportional to softmax(logits)_i / (L_i - minimum_i). The RL loss is the
    surrogate minus a lower bound, and the weights of a step use the losses of the previous step.
    `rollout_floor` must be a valid bound for the run's advantages: with K rollouts per prompt,
    advantages that are divided by the group's standard deviation reach sqrt(K - 1) in magnitude,
    and clipping allows 1.2 times that.
    """

    name: ClassVar[str] = "famo"
    source: ClassVar[str] = "arXiv 2306.03792"
    cost: ClassVar[str] = "forward pass over every row before and after the update"

    lr: float = 0.025
    """Step size of the logits (Adam)."""
    decay: float = 1e-3
    """Weight decay of the logits, added to their gradient."""
    rollout_floor: float = -3.2
    """Lower bound of the RL loss; losses below it are raised to it. The default is for K = 8."""

    def __post_init__(self) -> None:
        check_nonnegative(self, "lr", "decay")

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(losses_after=True)

    def init(self) -> State:
        zero = [0.0, 0.0]
        return {"logits": zero, "first": zero, "second": zero, "steps": 0, "losses": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        before, after = last.losses_before, last.losses_after
        if before is not None and after is not None and all(map(math.isfinite, (*before, *after))):
            state = self._adam_step(state, self._gaps(before), self._gaps(after))
            state["losses"] = list(before)
        if state["losses"] is None:
            return state, Mix(0.5)
        z, gaps = softmax(*state["logits"]), self._gaps(state["losses"])
        s, r = z[0] / gaps[0], z[1] / gaps[1]
        return state, Mix.weights(s / (s + r), r / (s + r))

    def _adam_step(self, state: State, old: Weights, new: Weights) -> State:
        """One step on the logits, from the decrease of both losses on one batch."""
        z = softmax(*state["logits"])
        decrease = [math.log(x) - math.log(y) for x, y in zip(old, new, strict=True)]
        mean = z[0] * decrease[0] + z[1] * decrease[1]
        steps = state["steps"] + 1
        rows = []
        for i in (0, 1):
            logit = state["logits"][i]
            gradient = z[i] * (decrease[i] - mean) + self.decay * logit
            first = 0.9 * state["first"][i] + 0.1 * gradient
            second = 0.999 * state["second"][i] + 0.001 * gradient**2
            size = math.sqrt(second / (1 - 0.999**steps)) + 1e-8
            rows.append((logit - self.lr * first / (1 - 0.9**steps) / size, first, second))
        logits, firsts, seconds = map(list, zip(*rows, strict=True))
        return {**state, "logits": logits, "first": firsts, "second": seconds, "steps": steps}

    def _gaps(self, losses: Sequence[float]) -> Weights:
        """How far the losses are above their lower bounds, > 0."""
        floors = (0.0, self.rollout_floor)
        s, r = (max(x, low) - low + EPSILON for x, low in zip(losses, floors, strict=True))
        return s, r
