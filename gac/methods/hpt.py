"""HPT: SFT on prompts that the policy cannot solve, RL on the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gac.errors import require
from gac.rollouts.advantages import Credit
from gac.rollouts.plan import Sampling
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State


@dataclass(frozen=True)
class HPT(Method):
    """Prompts with at most `switch` correct rollouts are trained only on their demonstration.

    RL follows the released code: centered advantages, no clipping, sums divided by
    `loss.max_tokens`. Its rule to skip updates with a gradient norm above 80 is not implemented.
    """

    name: ClassVar[str] = "hpt"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2509.04419"

    switch: int = 0
    """Largest number of correct rollouts at which a prompt is trained by SFT."""
    correct: float = 0.5
    """A rollout is correct if its reward is above this."""
    sft_coef: float = 1.0
    """Factor of the SFT loss, > 0; the publication uses 0.3 for a 1.5B model."""
    table: tuple[float, ...] | None = None
    """Soft gate: SFT weight in [0, 1] of a prompt with 0, 1, ..., K correct rollouts; its RL weight
    is 1 minus that. null: the hard gate.
    """
    entropy_coef: float = 0.001
    """Weight of the entropy bonus on rollouts."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def __post_init__(self) -> None:
        require(self.sft_coef > 0, "sft_coef", self.sft_coef, "a number > 0")
        if self.table is not None and not (self.table and all(0 <= x <= 1 for x in self.table)):
            raise ValueError(f"table={self.table!r}: use numbers in [0, 1], or null")

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(
            base,
            demo_weight=self.weight,
            demo_reduction="token",
            clip_low=None,
            clip_high=None,
            entropy_coef=self.entropy_coef,
            rollout_reduction="constant",
        )
        return Loss(spec)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", advantages="centered")

    def credit(self, rewards: torch.Tensor, demos: torch.Tensor | None, kind: str) -> Credit:
        num_correct = (rewards > self.correct).sum(1)
        if self.table is None:
            sft = (num_correct <= self.switch).to(rewards.dtype)
        else:
            table = torch.tensor(self.table, dtype=rewards.dtype)
            sft = table[num_correct.clamp(max=len(table) - 1)]
        credit = super().credit(rewards, demos, kind)
        return credit._replace(rollout_weight=1 - sft, demo_weight=sft)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(self.sft_coef, 1.0)
