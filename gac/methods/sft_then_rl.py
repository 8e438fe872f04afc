"""SFT followed by GRPO, the usual sequence, or by a constant mix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require

from .base import Mix, Observation, State, StepNeeds, TokenWeighted


@dataclass(frozen=True)
class SFTThenRL(TokenWeighted):
    """Only demonstrations for some steps, then rollouts, with or without demonstrations.

    The optimizer keeps its state.
    """

    name: ClassVar[str] = "sft-then-rl"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "the paper, section 4.1 (SFT-best + RL)"

    sft_steps: int = 400
    """Number of SFT steps before RL starts."""
    mu: float = 0.0
    """Weight of the demonstrations afterwards, in [0, 1]."""

    def __post_init__(self) -> None:
        require(self.sft_steps >= 0, "sft_steps", self.sft_steps, "a number >= 0")
        require(0 <= self.mu <= 1, "mu", self.mu, "a number in [0, 1]")

    def needs(self, step: int) -> StepNeeds:
        sft = step < self.sft_steps
        return StepNeeds(rollouts=not sft, demos=sft or self.mu > 0)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(1.0 if last.step < self.sft_steps else self.mu)
