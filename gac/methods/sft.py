"""SFT: demonstrations only, with the token weights of its variants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State, StepNeeds
from .preset import preset


@dataclass(frozen=True)
class SFT(Method):
    """Cross-entropy on the demonstrations; no rollouts."""

    name: ClassVar[str] = "sft"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "the paper, section 4.1"

    weight: DemoWeight = DemoWeight.ONE
    """Token weight: one, p, phi, shaped or trust."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rollouts=False)

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight))

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(1.0)


DFT = preset(
    SFT,
    "dft",
    "SFT with each token weighted by its own probability p, which is not differentiated.",
    source="arXiv 2508.05629",
    weight=DemoWeight.P,
)
