"""GTA: SFT and RL together, but only RL when the two gradients conflict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require
from gac.rollouts.plan import Sampling

from .base import Weights
from .gram_solver import Gram, GramSolver


@dataclass(frozen=True)
class GTA(GramSolver):
    """The weighted sum of the two gradients, or only the RL gradient if their cosine is negative.

    In the publication, the policy first writes a guess, which is trained by SFT, and the rest is
    trained by RL. Free text has no guess; our adaptation trains the last `guess_tokens` tokens of a
    demonstration by SFT.
    """

    name: ClassVar[str] = "gta"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2509.12108"

    sft_coef: float = 1.0
    """Weight of the SFT gradient."""
    rl_coef: float = 1.0
    """Weight of the RL gradient, > 0."""
    guess_tokens: int | None = None
    """Number of tokens at the end of a demonstration that SFT trains on; null: all."""

    def __post_init__(self) -> None:
        require(self.sft_coef >= 0, "sft_coef", self.sft_coef, "a number >= 0")
        require(self.rl_coef > 0, "rl_coef", self.rl_coef, "a number > 0")

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demo_tokens=self.guess_tokens)

    def closed_form(self, gram: Gram) -> Weights:
        return (0.0 if gram.dot < 0 else self.sft_coef), self.rl_coef
