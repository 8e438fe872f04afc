"""HPT: SFT on prompts that the policy cannot solve, RL on the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gac.rollouts.advantages import Credit
from gac.rollouts.plan import Sampling
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State


@dataclass(frozen=True)
class HPT(Method):
    """A prompt with at most `switch` right rollouts is learnt from its demonstration alone.

    RL as in the released program: centred advantages, no clip, sums over `loss.max_tokens`. Its
    rule of skipping updates with a gradient norm above 80 is not included.
    """

    name: ClassVar[str] = "hpt"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2509.04419"

    switch: int = 0
    """Most right rollouts of a prompt that is learnt by SFT."""
    correct: float = 0.5
    """A rollout is right if its reward is above this."""
    sft_coef: float = 1.0
    """Factor of the SFT loss, > 0; the publication uses 0.3 for 1.5B weights."""
    table: tuple[float, ...] | None = None
    """Soft gate: SFT weight of a prompt by its number of right rollouts, 0 to K, in [0, 1]; the
    rest is its RL weight. null: the hard gate."""
    entropy_coef: float = 0.001
    """Weight of the entropy bonus on rollouts."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def __post_init__(self) -> None:
        if not self.sft_coef > 0:
            raise ValueError(f"sft_coef={self.sft_coef!r}: use a number > 0")
        if self.table is not None and not (self.table and all(0 <= x <= 1 for x in self.table)):
            raise ValueError(f"table={self.table!r}: use numbers in [0, 1], or null")

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(
            base, demo_weight=self.weight, demo_reduction="token", clip_low=None, clip_high=None,
            entropy_coef=self.entropy_coef, rollout_reduction="constant",
        ))  # fmt: skip

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", advantages="centered")

    def credit(self, rewards: Tensor, demos: Tensor | None, kind: str) -> Credit:
        right = (rewards > self.correct).sum(1)
        if self.table is None:
            sft = (right <= self.switch).to(rewards.dtype)
        else:
            table = torch.tensor(self.table, dtype=rewards.dtype)
            sft = table[right.clamp(max=len(table) - 1)]
        credit = super().credit(rewards, demos, kind)
        return credit._replace(rollout_weight=1 - sft, demo_weight=sft)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(self.sft_coef, 1.0)
