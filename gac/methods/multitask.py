"""The multi-task baseline: GRPO plus cross-entropy on the same prompts' demonstrations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac.errors import require
from gac.rollouts.plan import Sampling
from gac_kernels import LossSpec

from .base import Loss, Mix, Observation, State, TokenWeighted


@dataclass(frozen=True)
class MultiTask(TokenWeighted):
    """The RL loss plus a constant times the SFT loss of the same prompts' demonstrations."""

    name: ClassVar[str] = "multitask"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2504.14945, baseline RL w/ SFT loss"

    sft_coef: float = 1.0
    """Factor of the SFT loss, >= 0."""

    def __post_init__(self) -> None:
        require(self.sft_coef >= 0, "sft_coef", self.sft_coef, "a number >= 0")

    def loss(self, base: LossSpec) -> Loss:
        return super().loss(replace(base, demo_reduction="token"))

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt")

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(self.sft_coef, 1.0)
