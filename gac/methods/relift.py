"""ReLIFT: RL, and SFT on collected prompts that the policy could not solve."""

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
class ReLIFT(Method):
    """RL on all prompts; SFT on `buffer` unsolved prompts whenever that many have been collected.

    A prompt is unsolved if the reward of every rollout is at most `correct`. The newest `buffer`
    of them are trained on and removed. RL follows the released code: centered advantages, no
    clipping, sums divided by `loss.max_tokens`; SFT is the mean over tokens. The publication makes
    a separate SFT update with its own optimizer after the RL update; here one update uses the sum
    of both gradients. The entropy bonus covers the rollouts only.
    """

    name: ClassVar[str] = "relift"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2506.07527 and its code"

    buffer: int = 128
    """Number of unsolved prompts that are trained on together."""
    correct: float = 0.0
    """A prompt is unsolved if no rollout has a reward above this."""
    sft_coef: float = 1.0
    """Factor of the SFT loss, > 0."""
    entropy_coef: float = 0.001
    """Weight of the entropy bonus on rollouts."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def __post_init__(self) -> None:
        require(self.buffer >= 1, "buffer", self.buffer, "a number >= 1")
        require(self.sft_coef > 0, "sft_coef", self.sft_coef, "a number > 0")

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
        return Sampling(demos="prompt", advantages="centered", collect=self.buffer)

    def credit(self, rewards: torch.Tensor, demos: torch.Tensor | None, kind: str) -> Credit:
        solved = (rewards > self.correct).any(1).to(rewards.dtype)  # nan: a dropped rollout
        return super().credit(rewards, demos, kind)._replace(demo_weight=1 - solved)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(self.sft_coef, 1.0)
