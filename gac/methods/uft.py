"""UFT: rollouts continue hints from the demonstration; the hints shrink and then disappear."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import ClassVar

from gac.errors import require
from gac.rollouts.plan import Sampling, Stage
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State


@dataclass(frozen=True)
class UFT(Method):
    """GRPO on rollouts after a random hint, plus coef times the mean cross-entropy of hint tokens.

    The hint is the first j of `pieces` equal parts of the demonstration without its EOS. At step t,
    j is binomial with probability low + (high - low) (1 + cos(pi (t + 1) / hint_steps)) / 2; from
    step `hint_steps` on, there is no hint. The publication's parts are steps of the solution; the
    released code cuts it into at most five, here by tokens. All rollouts of a prompt have the same
    hint. The published KL term is `loss.kl_coef`, 0.001 in the released code.
    """

    name: ClassVar[str] = "uft"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2505.16984 and its code"

    coef: float = 0.001
    """Weight of the hints' cross-entropy, >= 0."""
    low: float = 0.05
    """Probability of each part at the end of the curriculum, in [0, 1]."""
    high: float = 0.95
    """Probability of each part at its start, in [0, 1]."""
    hint_steps: int = 300
    """Steps with hints; the released code trains for 500 steps in total."""
    pieces: int = 5
    """Number of parts of a demonstration."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the hints."""

    def __post_init__(self) -> None:
        require(self.coef >= 0, "coef", self.coef, "a number >= 0")
        require(0 <= self.low <= 1, "low", self.low, "a number in [0, 1]")
        require(0 <= self.high <= 1, "high", self.high, "a number in [0, 1]")
        require(self.hint_steps >= 1, "hint_steps", self.hint_steps, "a number >= 1")
        require(self.pieces >= 1, "pieces", self.pieces, "a number >= 1")

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight, demo_reduction="token"))

    def sampling(self, completions: int) -> Sampling:
        stage = Stage(completions, trained=completions, length=self.hint_tokens)
        return Sampling("prompt", (stage,))

    def hint_tokens(self, step: int, tokens: int, rng: random.Random) -> int:
        """Length of the hint from a demonstration of `tokens` tokens; see `Stage.length`."""
        if step >= self.hint_steps:
            return 0
        cosine = math.cos(math.pi * (step + 1) / self.hint_steps)
        probability = self.low + (self.high - self.low) * (1 + cosine) / 2
        pieces = min(self.pieces, tokens - 1)
        shown = sum(rng.random() < probability for _ in range(pieces))
        return round(shown / pieces * (tokens - 1)) if pieces else 0

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(self.coef, 1.0)
