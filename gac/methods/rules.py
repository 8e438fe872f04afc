"""Rules: mu as a function of one or two measured quantities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from gac.fields import Count, Natural, Number, Valid, number
from gac.types import Mix, Observation, State, StepNeeds, Weights

from .base import TokenWeighted
from .solvers import Gram, GramSolver, cross_gram


def check_limits(mu_min: float, mu_init: float, mu_max: float) -> None:
    """Raise ValueError unless the limits of mu are in [0, 1] and contain its first value."""
    if not 0 <= mu_min <= mu_init <= mu_max <= 1:
        raise ValueError(
            f"mu_min={mu_min!r}, mu_init={mu_init!r}, mu_max={mu_max!r}: "
            "use 0 <= mu_min <= mu_init <= mu_max <= 1"
        )


@dataclass(frozen=True)
class Rule(TokenWeighted, family="rule", source="the paper, appendix I (rule-based controllers)"):
    """A method whose mu is a function of one quantity measured during training."""

    sign: Annotated[int, Valid("1 or -1", (1, -1).__contains__)] = 1
    """1: the printed rule; -1: the opposite direction."""
    calibration: Count = 50
    """Number of steps at `mu_init` that calibrate the rule's constant."""
    mu_init: float = 0.58
    """mu during calibration, and the rule's value at the mean measurement."""
    mu_min: float = 0.02
    """Lower bound of mu after the calibration."""
    mu_max: float = 0.98
    """Upper bound of mu after the calibration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.mu_min, self.mu_init, self.mu_max)

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


@dataclass(frozen=True)
class RewardThreshold(
    TokenWeighted, name="reward-threshold", family="rule", source="arXiv 2508.11408, appendix B.1"
):
    """mu = threshold - mean reward of the previous step, clipped to [0, 1]."""

    threshold: Number = 0.5
    """Mean reward at or above which demonstrations get no weight; the publication tries 0.5 and
    0.7.
    """

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rewards=True)

    def init(self) -> State:
        return {"mu": min(max(self.threshold, 0.0), 1.0)}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        if last.reward_mean is not None and math.isfinite(last.reward_mean):
            state = {"mu": min(max(self.threshold - last.reward_mean, 0.0), 1.0)}
        return state, Mix(state["mu"])


MIN_KL = 1e-6  # nats; lower bound of the mean KL, for a policy equal to the reference


@dataclass(frozen=True)
class KLControl(Rule, name="kl-ctrl", cost="reference forward pass on the rollouts"):
    """mu = 1 - KL / kappa; with sign -1, mu = KL / kappa, the direction of GAC's own KL loop."""

    mu_init: Annotated[float, number("a number in (0, 1)", lambda x: 0 < x < 1)] = 0.58
    """mu during calibration, and the rule's value at the mean KL."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(kl=True)

    def measured(self, last: Observation) -> float | None:
        return last.kl

    def constant(self, mean: float) -> float:
        return max(mean, MIN_KL) / (1 - self.mu_init if self.sign == 1 else self.mu_init)

    def rule(self, value: float, constant: float) -> float:
        share = value / constant
        return 1 - share if self.sign == 1 else share


MIN_VARIANCE = 1e-6  # squared reward; avoids division by zero when all rewards are equal


@dataclass(frozen=True)
class RewardVarianceControl(Rule, name="rewvar-ctrl"):
    """mu = c / Var(R) over the batch's rewards; with sign -1, mu = c Var(R)."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rewards=True)

    def measured(self, last: Observation) -> float | None:
        return last.reward_variance

    def constant(self, mean: float) -> float:
        scale = max(mean, 0.0) + MIN_VARIANCE
        return self.mu_init * scale if self.sign == 1 else self.mu_init / scale

    def rule(self, value: float, constant: float) -> float:
        scale = max(value, 0.0) + MIN_VARIANCE
        return constant / scale if self.sign == 1 else constant * scale


@dataclass(frozen=True)
class GradNormControl(
    GramSolver,
    name="gradnorm-ctrl",
    family="rule",
    source="the paper, appendix I (rule-based controllers)",
    cost="second gradient buffer, on measurement steps",
):
    """mu = |g_s| / (|g_s| + |g_r|), measured every `update_every` steps.

    This favors the larger gradient, the opposite of balancing; set `invert` to balance.
    """

    update_every: Count = 10
    """Number of steps between measurements; mu is constant in between."""
    invert: bool = False
    """Use mu = |g_r| / (|g_s| + |g_r|) instead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit_rl:
            raise ValueError("unit_rl=True: use false; this rule compares the gradient norms")

    def init(self) -> State:
        return {**super().init(), "mu": 0.5}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(state["mu"])

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=int(step % self.update_every == 0))

    def weights(self, state: State, gram: Gram) -> tuple[State, Weights | None]:
        sft, rl = math.sqrt(gram.sft), math.sqrt(gram.rl)
        if sft + rl > 0:
            mu = (rl if self.invert else sft) / (sft + rl)
            state = {**state, "mu": mu}
        return state, Mix(state["mu"]).pair


@dataclass(frozen=True)
class AMFT(
    TokenWeighted,
    name="amft",
    family="rule",
    source="arXiv 2508.06944v1 and its code",
    cost="second gradient buffer, on measurement steps",
):
    """After a warm-up with SFT only, mu += meta_lr dU/dmu + entropy_lr (H* - H), clipped.

    U is the expected reward after a step of plain gradient descent with this mu. Its derivative is
    lr <g_v, g_s - g_r>. Here g_s and g_r are the gradients of the two losses, and g_v is the
    gradient of the RL loss on other prompts: a batch is split in two halves, and the result is
    averaged over both ways to assign them. dU/dmu is measured every `update_every` steps. H is the
    mean entropy of the rollouts at every step; H* is its value at the first step with rollouts.

    The released code uses PPO with a value head, takes H* from the demonstrations, and uses the
    cross-entropy of a validation set instead of the reward; there, the sign of dU/dmu is reversed.
    With the learning rates of that code, the product meta_lr lr is 1e-10, so the entropy determines
    mu.
    """

    warmup: Natural = 50
    """Number of steps at the start that use demonstrations only."""
    mu_init: float = 0.8
    """mu of the first step after the warm-up."""
    mu_min: float = 0.05
    """Lower bound of mu after the warm-up."""
    mu_max: float = 0.95
    """Upper bound of mu after the warm-up."""
    meta_lr: Number = 1e-4
    """Step size of the meta-gradient."""
    entropy_lr: Number = 5e-4
    """Step size of the entropy term, in 1 / nats."""
    update_every: Count = 20
    """Number of steps between measurements of the meta-gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.mu_min, self.mu_init, self.mu_max)

    def needs(self, step: int) -> StepNeeds:
        if step < self.warmup:
            return StepNeeds(rollouts=False)
        measures_slope = (step - self.warmup) % self.update_every == 0
        return StepNeeds(parts=2 if measures_slope else 0)

    def init(self) -> State:
        return {"mu": self.mu_init, "target": None, "slope": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        if last.step < self.warmup:
            return state, Mix(1.0)
        mu, entropy = state["mu"], last.entropy
        target, slope, lr = state["target"], state["slope"] or 0.0, last.lr or 0.0
        if entropy is not None and math.isfinite(entropy):
            target = entropy if target is None else target
            mu += self.meta_lr * lr * slope + self.entropy_lr * (target - entropy)
            mu = min(max(mu, self.mu_min), self.mu_max)
        return {"mu": mu, "target": target, "slope": None}, Mix(mu)

    def solve(self, state: State, gram: torch.Tensor, mix: Mix) -> tuple[State, Weights | None]:
        (_, sr), (rs, rr) = cross_gram(gram, 2)
        return {**state, "slope": (sr + rs) / 2 - rr}, mix.pair

    def report(self, state: State) -> dict[str, float | None]:
        return {"reward_slope": state["slope"], "entropy_target": state["target"]}
