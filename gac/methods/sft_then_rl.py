"""SFT followed by GRPO: the usual sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac.errors import require
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State, StepNeeds


@dataclass(frozen=True)
class SFTThenRL(Method):
    """Only demonstrations for some steps, then only rollouts; one optimizer throughout."""

    name: ClassVar[str] = "sft-then-rl"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "the paper, section 4.1 (SFT-best + RL)"

    sft_steps: int = 400
    """Steps of SFT."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def __post_init__(self) -> None:
        require(self.sft_steps >= 0, "sft_steps", self.sft_steps, "a number >= 0")

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight))

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rollouts=step >= self.sft_steps, demos=step < self.sft_steps)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(float(last.step < self.sft_steps))
