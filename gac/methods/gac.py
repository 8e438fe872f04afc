"""GAC: mu from the noise of both gradients and their disagreement (the paper, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac.controller import ControllerConfig, GuidedController
from gac_kernels import DemoWeight, LossSpec

from .base import Method, Mix, Observation, State


@dataclass(frozen=True)
class GAC(ControllerConfig, Method):
    """The guided adaptive controller; its fields are the controller's own."""

    family: ClassVar[str] = "noise-aware"
    source: ClassVar[str] = "the paper, section 3 and Algorithm 1"

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
        return (step + 1) % self.update_every == 0 or step == 0
