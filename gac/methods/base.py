"""What a method is: frozen hyperparameters, explicit state, and a few questions the trainer asks.

The trainer never names a method. It reads the class attributes to know what to prepare, calls
`mix` once per optimiser step and keeps the returned state, which is saved with the checkpoint.
Legend: N tokens, Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gac.control.estimators import Corrections
from gac.control.signals import Evidence
from gac.control.solvers import Weights
from gac.rollouts.advantages import group_advantages
from gac_kernels import LossSpec, Signals

if TYPE_CHECKING:
    from gac.training.token_loss import TokenView

State = dict[str, Any]  # plain JSON types
Losses = tuple[float, float]  # (SFT, RL)


class Mix(NamedTuple):
    """Weights of one step: loss = scale * ((1 - mu) * rollout_loss + mu * demo_loss)."""

    mu: float
    scale: float = 1.0

    @classmethod
    def weights(cls, demo: float, rollout: float) -> Mix:
        """From the weight of each term; their sum must not be 0."""
        return cls(demo / (demo + rollout), demo + rollout)

    @property
    def pair(self) -> Weights:
        """The weight of the demonstration term and that of the rollout term."""
        return self.scale * self.mu, self.scale * (1 - self.mu)


class Stage(NamedTuple):
    """Some of the rollouts of each prompt, drawn together; later stages see earlier rewards."""

    size: int
    """Rollouts."""
    prefix: float = 0.0
    """Share of the prompt's demonstration that is given before the policy continues, [0, 1]."""
    below: float = math.inf
    """The prefix is given only while the mean reward of the earlier stages is below this."""
    trained: int = 0
    """Number of rollouts, the last ones of the stage, whose prefix is learnt as a demonstration."""


@dataclass(frozen=True)
class Observation:
    """What training knows when the weights of the next step are chosen; None = not measured.

    Every value is global over ranks and stems from the step before.
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
    """How one method combines SFT and RL. Fields are its hyperparameters and become CLI flags."""

    name: ClassVar[str] = ""
    """Key in the table of methods and value of `method.name` in a configuration."""
    family: ClassVar[str] = ""
    """Row group in the table of methods."""
    source: ClassVar[str] = ""
    """Where the formula is published."""
    cost: ClassVar[str] = "none"
    """Work per step beyond one forward of every row and one backward of those that learn."""
    uses_rollouts: ClassVar[bool] = True
    """False: never samples."""
    demos: ClassVar[str] = "apart"
    """"apart": a batch of the demonstrations' own set in every step. "prompt": the demonstrations
    of the sampled prompts themselves. "none": no demonstration is read."""
    uses_reference: ClassVar[bool] = False
    """True: needs the frozen initial policy."""
    samples_reference: ClassVar[bool] = False
    """True: the rollouts are drawn from the frozen initial policy."""
    pairs: ClassVar[bool] = False
    """True: of each prompt only a best and a worst rollout are kept, with advantages 1 and -1."""
    demo_in_group: ClassVar[bool] = False
    """True: demonstrations are scored and share the baseline of their prompt's rollouts."""
    pooled: ClassVar[bool] = False
    """True: both terms are divided by one count over all rows."""
    own_loss: ClassVar[bool] = False
    """True: `token_loss` replaces the fused loss."""
    looks_back: ClassVar[bool] = False
    """True: the batch's losses are measured again after the update, for `after_step`."""
    keeps_best: ClassVar[bool] = False
    """True: the run ends with the weights of its best evaluation."""
    tracking: ClassVar[bool] = False
    """True: `track` gives the rate at which moving averages replace the two gradients."""

    def spec(self, base: LossSpec) -> LossSpec:
        """The loss of this method, from the run's own settings."""
        return base

    def init(self) -> State:
        """State before the first step."""
        return {}

    def mix(self, state: State, seen: Observation) -> tuple[State, Mix]:
        """The weights of the step that follows `seen`, and the state after choosing them."""
        raise NotImplementedError

    # ---- what a step samples and learns from

    def rollouts_at(self, step: int) -> bool:
        """Whether step `step` (from 0) samples."""
        return self.uses_rollouts

    def demos_at(self, step: int) -> bool:
        """Whether step `step` reads demonstrations."""
        return self.demos != "none"

    def stages(self, completions: int) -> Sequence[Stage]:
        """How the `completions` rollouts of a prompt are drawn."""
        return (Stage(completions),)

    def gate(self, rewards: Sequence[float]) -> tuple[float, float]:
        """Weights of a prompt's rollouts and of its demonstration; a weight of 0 drops the rows."""
        return 1.0, 1.0

    def advantages(self, rewards: Tensor, demos: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """[Q, K] and [Q] advantages of rollouts and of their prompts' demonstrations.

        rewards: [Q, K]; demos: [Q]; nan = none. kind: the run's own normalisation.
        """
        if not self.demo_in_group:
            return group_advantages(rewards, kind), torch.ones_like(demos)
        table = group_advantages(torch.cat([rewards, demos[:, None]], 1), kind)
        return table[:, :-1], table[:, -1]

    def demo_set(self, size: int) -> int:
        """How many of `size` demonstrations are used."""
        return size

    def length(self, steps: int, demos: int, batch: int) -> int:
        """Optimiser steps of a run of at most `steps`; `demos` demonstrations, `batch` a step."""
        return steps

    def finished(self, state: State) -> bool:
        """Whether training may stop before its last step."""
        return False

    def demo_tokens(self, length: int) -> int:
        """How many tokens at the end of a demonstration of `length` tokens have a loss."""
        return length

    # ---- what a step measures

    def wants_signals(self, step: int) -> bool:
        """Whether step `step` must measure the controller's signals."""
        return False

    def wants_kl(self, step: int) -> bool:
        """Whether step `step` must measure the KL to the reference."""
        return self.wants_signals(step)

    def read(self, state: State, evidence: Evidence) -> tuple[State, Signals, Corrections | None]:
        """The signals of a step that wants them, through the method's signal source."""
        raise NotImplementedError

    @property
    def trim(self) -> float:
        """Share of the demonstrations that the recorded sigma_s^2 leaves out at each end."""
        return 0.1

    # ---- gradients and losses of its own

    def parts(self, step: int) -> int:
        """0: one gradient of the mixed loss. n: n separate gradients of each of the two terms."""
        return 0

    def solve(
        self, state: State, gram: Tensor, mix: Mix, seen: Observation
    ) -> tuple[State, Weights | None]:
        """Weights of the two terms from the gradients; None skips the update.

        gram: float64 [2 n, 2 n] inner products of the `parts`, SFT first; the gradient of a term is
        the mean of its parts.
        """
        return state, mix.pair

    @property
    def measures_bias(self) -> bool:
        """Whether steps with `parts` also take both gradients without phi and without the clip."""
        return False

    def track(self, step: int) -> float:
        """Rate of the moving averages in step `step`, see `tracking`."""
        return 1.0

    def token_loss(self, tokens: TokenView) -> Tensor:
        """[N] loss of each token, differentiable through `tokens.logps`, under `own_loss`."""
        raise NotImplementedError

    def after_step(self, state: State, before: Losses, after: Losses) -> State:
        """The state after an update that moved the batch's losses, under `looks_back`."""
        return state

    def report(self, state: State) -> dict[str, float | None]:
        """Further columns of the metrics file, e.g. mu_star, prior, alpha."""
        return {}
