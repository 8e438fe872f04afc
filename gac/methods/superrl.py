"""SuperRL: SFT on prompts whose rollouts all fail, RL on the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gac.rollouts.advantages import Credit
from gac.rollouts.plan import Sampling

from .base import Mix, Observation, State, TokenWeighted


@dataclass(frozen=True)
class SuperRL(TokenWeighted):
    """Prompts whose rollouts all have reward 0 are trained only on their demonstration.

    Every other prompt is trained by RL: loss = sum over prompts of L_SFT where max_k r_k <= 0, else
    L_RL. This is the second version of the publication; the first version switched for a whole run.
    The publication leaves open how the two sums are normalized: here each term is the mean over its
    own rows, and the terms are added. HPT is the same rule with another RL loss.
    """

    name: ClassVar[str] = "superrl"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2506.01096v2"

    correct: float = 0.0
    """A prompt is trained by RL if the reward of any rollout is above this."""

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt")

    def credit(self, rewards: torch.Tensor, demos: torch.Tensor | None, kind: str) -> Credit:
        solved = (rewards > self.correct).any(1).to(rewards.dtype)  # nan: a dropped rollout
        credit = super().credit(rewards, demos, kind)
        return credit._replace(rollout_weight=solved, demo_weight=1 - solved)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(1.0, 1.0)
