"""SFT: demonstrations only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac_kernels import DemoWeight, LossSpec

from .base import Method, Mix, Observation, State


@dataclass(frozen=True)
class SFT(Method):
    """Cross-entropy on the demonstrations; no rollouts."""

    name: ClassVar[str] = "sft"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "the paper, section 4.1 (SFT-light, SFT-best)"
    uses_rollouts: ClassVar[bool] = False

    weight: DemoWeight = DemoWeight.ONE
    """Token weight: one, p, phi, shaped or trust."""

    def spec(self, base: LossSpec) -> LossSpec:
        return replace(base, demo_weight=self.weight)

    def mix(self, state: State, seen: Observation) -> tuple[State, Mix]:
        return state, Mix(1.0)
