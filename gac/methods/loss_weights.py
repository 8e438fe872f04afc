"""Methods that weight the two terms by their losses, or by their losses and gradient norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gac.fields import Count, NonNegative, Number, Positive
from gac.types import Mix, Observation, State, StepNeeds, TermPair, Weights

from .base import TokenWeighted
from .solvers import Gram, GramSolver

MIN_LOSS = 1e-3  # lower bound of a loss, so that ratios are finite
EPSILON = 1e-8  # avoids division by a loss of exactly 0


def positive_losses(last: Observation) -> TermPair | None:
    """(demonstration loss, 1 - mean reward), each at least MIN_LOSS.

    None before the first step, or if one is not finite. The policy-gradient surrogate is near 0 and
    changes sign, so it does not measure progress. The publications have no such term; 1 - mean
    reward is our choice, for rewards in [0, 1].
    """
    if last.demo_loss is None or last.reward_mean is None:
        return None
    losses = TermPair(max(last.demo_loss, MIN_LOSS), max(1 - last.reward_mean, MIN_LOSS))
    return losses if all(map(math.isfinite, losses)) else None


def softmax(x: float, y: float) -> Weights:
    """The softmax of two numbers."""
    top = max(x, y)
    a, b = math.exp(x - top), math.exp(y - top)
    return a / (a + b), b / (a + b)


@dataclass(frozen=True)
class LossWeights(TokenWeighted, family="loss weighting"):
    """Weights from the history of the two losses; see `positive_losses`."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rewards=True)


BOUND = 6.0  # largest |s|, in case a loss reaches 0


@dataclass(frozen=True)
class Uncertainty(LossWeights, name="uncertainty", source="arXiv 1705.07115"):
    """Weights exp(-s) / 2 with learned log-variances s, whose fixed point is exp(s) = loss.

    Each step is one gradient step on s for the sum of exp(-s_i) L_i / 2 + s_i / 2.
    """

    lr: NonNegative = 0.025
    """Step size of s."""

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


@dataclass(frozen=True)
class DWA(LossWeights, name="dwa", source="arXiv 1803.10704"):
    """Softmax weights from the ratio of each loss's last two window means, newer over older.

    w_i = 2 softmax(newer / older / temperature); 1 until two windows are complete.
    """

    temperature: Positive = 2.0
    """Softmax temperature, > 0; the paper tries 1, 2 and 4."""
    window: Count = 25
    """Number of steps per window; the publication uses an epoch."""

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


@dataclass(frozen=True)
class FAMO(
    LossWeights,
    name="famo",
    source="arXiv 2306.03792",
    cost="forward pass over every row before and after the update",
):
    """Learned weights that make the logarithms of both losses fall at the same rate.

    The weights are proportional to softmax(logits)_i / (L_i - minimum_i). The RL loss is the
    surrogate minus a lower bound, and the weights of a step use the losses of the previous step.
    `rollout_floor` must be a valid bound for the run's advantages: with K rollouts per prompt,
    advantages that are divided by the group's standard deviation reach sqrt(K - 1) in magnitude,
    and clipping allows 1.2 times that.
    """

    lr: NonNegative = 0.025
    """Step size of the logits (Adam)."""
    decay: NonNegative = 1e-3
    """Weight decay of the logits, added to their gradient."""
    rollout_floor: Number = -3.2
    """Lower bound of the RL loss; losses below it are raised to it. The default is for K = 8."""

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


MIN_WEIGHT = 1e-3  # lower bound of the weights: a weight of 0 could never recover


@dataclass(frozen=True)
class GradNorm(GramSolver, name="gradnorm", source="arXiv 1711.02257"):
    """Learned weights that give each weighted gradient a target norm, larger if its loss fell less.

    The weights w, whose sum is 2, move towards w_i |g_i| = mean(w |g|) r_i^asymmetry, where r_i is
    the relative loss L_i / L_i(0) over its mean; for RL the loss is 1 - mean reward. The update
    uses only the sign of the error, so mu jitters by about `lr`.
    """

    asymmetry: Number = 1.5
    """The publication's alpha; 0 makes the norms equal."""
    lr: NonNegative = 0.025
    """Step size of a weight, in units of its gradient norm over the mean norm."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=1, rewards=True)

    def init(self) -> State:
        return {**super().init(), "weights": [1.0, 1.0], "initial": None, "losses": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        if (losses := positive_losses(last)) is not None:
            state = {**state, "losses": list(losses)}
        return super().mix(state, last)

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
