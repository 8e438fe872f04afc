"""SFT, then GRPO from where it ended: the usual sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac_kernels import DemoWeight, LossSpec

from .base import Method, Mix, Observation, State


@dataclass(frozen=True)
class SFTThenRL(Method):
    """Demonstrations alone for some steps, then rollouts alone; one optimiser throughout."""

    name: ClassVar[str] = "sft-then-rl"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "the paper, section 4.1 (SFT-best + RL)"

    sft_steps: int = 400
    """Steps of SFT."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def __post_init__(self) -> None:
        if self.sft_steps < 0:
            raise ValueError(f"sft_steps={self.sft_steps!r}: use a number >= 0")

    def spec(self, base: LossSpec) -> LossSpec:
        return replace(base, demo_weight=self.weight)

    def rollouts_at(self, step: int) -> bool:
        return step >= self.sft_steps

    def demos_at(self, step: int) -> bool:
        return step < self.sft_steps

    def mix(self, state: State, seen: Observation) -> tuple[State, Mix]:
        return state, Mix(float(self.demos_at(seen.step)))
