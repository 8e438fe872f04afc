"""GAC: mu from the noise of both gradients and their disagreement (the paper, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac.controller import ControllerConfig, GuidedController
from gac.schedules import Prior
from gac_kernels import DemoWeight, LossSpec

from .base import Method, Mix, Observation, State


@dataclass(frozen=True)
class GAC(ControllerConfig, Method):
    """The guided adaptive controller; its fields are the controller's own."""

    name: ClassVar[str] = "gac"
    family: ClassVar[str] = "noise-aware"
    source: ClassVar[str] = "the paper, section 3 and Algorithm 1"

    prior: Prior = Prior()
    """mu_prior(t)."""
    weight: DemoWeight = DemoWeight.PHI
    """Token weight of the demonstrations; one = the paper's "GAC w/o phi"."""

    def spec(self, base: LossSpec) -> LossSpec:
        return replace(base, demo_weight=self.weight)

    def init(self) -> State:
        return GuidedController(self).state_dict()

    def mix(self, state: State, seen: Observation) -> tuple[State, Mix]:
        controller = GuidedController(self)
        controller.load_state_dict(state)
        mu = controller.update(seen.signals, seen.kl)
        return controller.state_dict(), Mix(mu)

    def wants_signals(self, step: int) -> bool:
        # update t sees what step t - 1 measured; the very first signals start the averages early
        return step == 0 or self.is_refresh(step + 1)

    def report(self, state: State) -> dict[str, float | None]:
        return {name: state[name] for name in ("mu_star", "prior", "alpha")}
