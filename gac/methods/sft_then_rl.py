"""SFT followed by GRPO: the usual sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require

from .base import Mix, Observation, State, StepNeeds, TokenWeighted


@dataclass(frozen=True)
class SFTThenRL(TokenWeighted):
    """Only demonstrations for some steps, then only rollouts; one optimizer throughout."""

    name: ClassVar[str] = "sft-then-rl"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "the paper, section 4.1 (SFT-best + RL)"

    sft_steps: int = 400
    """Steps of SFT."""

    def __post_init__(self) -> None:
        require(self.sft_steps >= 0, "sft_steps", self.sft_steps, "a number >= 0")

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rollouts=step >= self.sft_steps, demos=step < self.sft_steps)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(float(last.step < self.sft_steps))
