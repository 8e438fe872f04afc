"""What a method is: frozen hyperparameters, explicit state, and a few questions the trainer asks.

What does a step need (`needs`), how is it sampled (`sampling`), what is its loss (`loss`), how are
the two terms mixed (`mix`)? The rest has a default. The trainer never names a method. It keeps the
state that a method returns, in plain JSON types, and saves it with the checkpoint.
Legend: N tokens, Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from gac.control.estimators import Corrections
from gac.control.evidence import Evidence, Reading
from gac.control.solvers import Weights
from gac.pair import Pair
from gac.rollouts.advantages import Credit, group_credit
from gac.rollouts.plan import Sampling
from gac_kernels import LossSpec, Signals

if TYPE_CHECKING:
    from gac.training.token_loss import TokenView

State = dict[str, Any]  # plain JSON types


class Mix(NamedTuple):
    """Weights of one step: loss = scale * ((1 - mu) * rollout_loss + mu * demo_loss)."""

    mu: float
    scale: float = 1.0
    final: bool = False
    """The run may end after this step, before its last one."""

    @classmethod
    def weights(cls, demo: float, rollout: float) -> Mix:
        """From the weight of each term; their sum must not be 0."""
        return cls(demo / (demo + rollout), demo + rollout)

    @property
    def pair(self) -> Pair:
        """The weight of each term."""
        return Pair(self.scale * self.mu, self.scale * (1 - self.mu))


class Needs(NamedTuple):
    """What one step provides and measures."""

    rollouts: bool = True
    """The policy is sampled."""
    demos: bool = True
    """Demonstrations are read."""
    kl: bool = False
    """The KL to the frozen initial policy is measured."""
    signals: bool = False
    """The controller's signals are read, see `Method.after_step`."""
    parts: int = 0
    """0: one gradient of the mixed loss. n: n separate gradients of each of the two terms."""
    bias: bool = False
    """With `parts`: also both gradients without phi and without the clip."""
    average: float = 0.0
    """With `parts`: rate of the moving averages that replace the gradients; 0: none do."""
    losses_after: bool = False
    """The losses of the batch are measured again after the update."""
    trim: float = 0.1
    """Share of the demonstrations that the recorded sigma_s^2 leaves out at each end."""
    sketch: int = 0
    """Size of the head sketch of each unit's gradient; 0: none."""
    norms: bool = False
    """The norm of the accumulated gradient is measured after each micro-batch."""

    @classmethod
    def union(cls, needs: Iterable[Needs]) -> Needs:
        """What is needed to serve all of `needs`, at least one."""
        return functools.reduce(lambda a, b: cls._make(map(max, a, b)), needs)


class Loss(NamedTuple):
    """What a method minimises."""

    spec: LossSpec
    """The fused loss; with `token`, its reductions and statistics."""
    token: Callable[[TokenView], Tensor] | None = None
    """[N] loss of each token, differentiable through `TokenView.logps`, instead of the fused
    one."""
    pooled: bool = False
    """Both terms are divided by one count over all rows."""
    reference: bool = False
    """`token` reads the last layer of the frozen initial policy."""


class Outcome(NamedTuple):
    """What an applied step has measured."""

    evidence: Evidence | None
    """For the signals, under `Needs.signals`."""
    before: Pair
    """The losses that were descended on."""
    after: Pair | None
    """Those of the same batch under the new weights, under `Needs.losses_after`."""


@dataclass(frozen=True)
class Observation:
    """What training knows when the weights of the next step are chosen; None = not measured.

    Every value is of the step before, over all ranks.
    """

    step: int
    """Optimiser steps done so far."""
    signals: Signals | None = None
    """The controller's three inputs, on the steps after a refresh only."""
    kl: float | None = None
    """Mean k3 KL to the reference policy per rollout token, nats."""
    entropy: float | None = None
    """Mean entropy per rollout token, nats."""
    reward_mean: float | None = None
    """Mean reward of the rollouts."""
    reward_variance: float | None = None
    """Population variance of the rewards over the batch."""
    rollout_loss: float | None = None
    """The reduced rollout term."""
    demo_loss: float | None = None
    """The reduced demonstration term."""
    corrections: Corrections | None = None
    """Covariance and biases of the two gradients, beside `signals` where the source has them."""

    @classmethod
    def restore(cls, plain: dict[str, Any]) -> Observation:
        """Inverse of `dataclasses.asdict` through JSON, which turns named tuples into lists."""
        kinds = {"signals": Signals, "corrections": Corrections}
        return cls(
            **{
                key: kinds[key](*value) if key in kinds and value is not None else value
                for key, value in plain.items()
            }
        )


@dataclass(frozen=True)
class Method:
    """How one method combines SFT and RL.

    Fields of a subclass are its hyperparameters and become configuration keys. State is a mapping
    of plain JSON types that goes in and comes out, so that every checkpoint holds it.
    """

    name: ClassVar[str] = ""
    """What a configuration calls it: `method: NAME`."""
    family: ClassVar[str] = ""
    """Its group in lists of methods."""
    source: ClassVar[str] = ""
    """Where the formula is published."""
    cost: ClassVar[str] = "none"
    """Work per step beyond one forward pass of every row and one backward pass of those that
    learn."""
    keeps_best: ClassVar[bool] = False
    """Whether the run ends with the weights of its best evaluation."""

    def needs(self, step: int) -> Needs:
        """What the trainer must provide and measure in step `step`, from 0."""
        return Needs()

    def sampling(self, completions: int) -> Sampling:
        """How prompts and demonstrations become rows, with `completions` rollouts per prompt."""
        return Sampling()

    def loss(self, base: LossSpec) -> Loss:
        """What the method minimises; `base` is the run's section `loss`."""
        return Loss(base)

    def credit(self, rewards: Tensor, demos: Tensor | None, kind: str) -> Credit:
        """Advantages and row weights from rewards.

        Args:
            rewards: [Q, K], of K rollouts of each of Q prompts.
            demos: [Q] rewards of demonstrations that are members of their prompt's group; None:
                they are not.
            kind: how rewards are normalised, as `rollouts.advantages`.
        """
        return group_credit(rewards, demos, kind)

    def init(self) -> State:
        """State before the first step."""
        return {}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        """Choose the weights of the next step; the one method that a subclass must have.

        Args:
            state: the state so far.
            last: what training knows, measured in the step before.

        Returns:
            The new state, and the weights.
        """
        raise NotImplementedError

    def notice(self, before: State, after: State) -> str | None:
        """What a user should hear of the change that `mix` has made to the state."""
        return None

    def solve(
        self, state: State, gram: Tensor, mix: Mix, last: Observation
    ) -> tuple[State, Weights | None]:
        """Change the weights after both gradients are known, under `Needs.parts`.

        Args:
            state: the state so far.
            gram: float64 [2 n, 2 n] inner products of the n parts of each term, demonstrations
                first; the gradient of a term is the mean of its parts.
            mix: the weights that `mix` chose.
            last: as in `mix`.

        Returns:
            The new state, and the weight of each term; None skips the update.
        """
        return state, mix.pair

    def after_step(self, state: State, outcome: Outcome) -> tuple[State, Reading | None]:
        """Learn from an update that was applied.

        Returns:
            The new state, and what the signal source read, in a step with signals.
        """
        return state, None

    def report(self, state: State) -> dict[str, float | None]:
        """Further columns of `metrics.jsonl`, such as mu_star, prior and alpha."""
        return {}
