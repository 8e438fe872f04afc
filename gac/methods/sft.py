"""SFT: demonstrations only, with the token weights of its variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac_kernels import DemoWeight

from .base import Mix, Observation, State, StepNeeds, TokenWeighted
from .preset import preset


@dataclass(frozen=True)
class SFT(TokenWeighted):
    """Cross-entropy on the demonstrations; no rollouts."""

    name: ClassVar[str] = "sft"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "the paper, section 4.1"

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rollouts=False)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(1.0)


DFT = preset(
    SFT,
    "dft",
    "SFT with each token weighted by its own probability p, which is not differentiated.",
    source="arXiv 2508.05629",
    weight=DemoWeight.P,
)
