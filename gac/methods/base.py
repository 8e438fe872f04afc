"""What a method is: frozen hyperparameters, explicit state, and a few questions the trainer asks.

The trainer never names a method. It reads the class attributes to know what to prepare, calls
`mix` once per optimiser step and keeps the returned state, which is saved with the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gac_kernels import LossSpec, Signals

State = dict[str, Any]  # plain JSON types


class Mix(NamedTuple):
    """Weights of one step: loss = scale * ((1 - mu) * rollout_loss + mu * demo_loss)."""

    mu: float
    scale: float = 1.0

    @classmethod
    def weights(cls, demo: float, rollout: float) -> Mix:
        """From the weight of each term; both >= 0, not both 0."""
        return cls(demo / (demo + rollout), demo + rollout)


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


@dataclass(frozen=True)
class Method:
    """How one method combines SFT and RL. Fields are its hyperparameters and become CLI flags."""

    name: ClassVar[str] = ""
    """Key in the table of methods and value of `method.name` in a configuration."""
    family: ClassVar[str] = ""
    """Row group in the table of methods."""
    source: ClassVar[str] = ""
    """Where the formula is published."""
    uses_rollouts: ClassVar[bool] = True
    """False: never samples from the policy."""
    uses_demos: ClassVar[bool] = True
    """False: never reads a demonstration."""

    def spec(self, base: LossSpec) -> LossSpec:
        """The loss of this method, from the run's own settings."""
        return base

    def init(self) -> State:
        """State before the first step."""
        return {}

    def mix(self, state: State, seen: Observation) -> tuple[State, Mix]:
        """The weights of the step that follows `seen`, and the state after choosing them."""
        raise NotImplementedError

    def wants_signals(self, step: int) -> bool:
        """Whether the step numbered `step` (from 0) must measure the signals and the KL."""
        return False

    @property
    def trim(self) -> float:
        """Share of the demonstrations that sigma_s^2 leaves out at each end."""
        return 0.1

    def report(self, state: State) -> dict[str, float | None]:
        """Further columns of the metrics file, e.g. mu_star, prior, alpha."""
        return {}
