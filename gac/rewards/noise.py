"""Noisy rewards for training. Evaluation always uses the reward without noise."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gac.errors import require, require_at_least

from .base import Reward, RowOutcome, as_outcome
from .build import build_reward

if TYPE_CHECKING:
    from gac.data import Example


@dataclass(frozen=True)
class RewardNoise:
    """Each training reward r becomes low + high - r with probability `rate`."""

    rate: float = 0.0
    """Probability that a reward is flipped, in [0, 1]."""
    start: int = 0
    """First step with noise, counted from 0."""
    low: float = 0.0
    """The reward's smallest value."""
    high: float = 1.0
    """The reward's largest value."""

    def __post_init__(self) -> None:
        require(0 <= self.rate <= 1, "rate", self.rate, "a number in [0, 1]")
        require_at_least(0, self, "start")


class NoisyReward(Reward):
    """Adds noise to another reward.

    The noise depends only on the seed, step, rank and order of calls.
    """

    def __init__(self, reward: Reward, noise: RewardNoise, seed: int, rank: int = 0) -> None:
        self.reward, self.noise, self.name = reward, noise, f"noisy {reward.name}"
        self.on_error = reward.on_error
        self._source = f"reward noise:{seed}:{rank}"
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Set the optimizer step that the following calls belong to."""
        self.reward.set_step(step)
        self._rate = self.noise.rate if step >= self.noise.start else 0.0
        self._rng = random.Random(f"{self._source}:{step}")

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        return [self._flip(o) for o in self.reward.outcomes(completions, examples)]

    def counts(self) -> dict[str, int]:
        """The inner reward's counts."""
        return self.reward.counts()

    def close(self) -> None:
        self.reward.close()

    def _flip(self, outcome: RowOutcome) -> RowOutcome:
        flips = self._rng.random() < self._rate
        outcome = as_outcome(outcome)
        if isinstance(outcome, Exception) or not flips:
            return outcome
        return self.noise.low + self.noise.high - outcome


def build_rewards(
    spec: str | Mapping[str, Any], noise: RewardNoise | None, seed: int, rank: int
) -> tuple[Reward, Reward]:
    """Return the evaluation reward and the training reward, which has noise if `noise` is given."""
    reward = build_reward(spec)
    return reward, reward if noise is None else NoisyReward(reward, noise, seed, rank)
