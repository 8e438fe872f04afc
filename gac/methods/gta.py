"""GTA: SFT and RL together, but RL alone where the two gradients conflict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import Gram, Weights
from gac.rollouts.plan import Sampling

from .gram_solver import GramSolver


@dataclass(frozen=True)
class GTA(GramSolver):
    """The sum of both gradients; the RL gradient alone where their cosine is negative.

    The publication has the policy write a guess first, learnt by SFT, and the rest by RL. Free
    text has no such part: `guess_tokens` takes the end of a demonstration for it (our adaptation).
    """

    name: ClassVar[str] = "gta"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2509.12108"

    sft_coef: float = 1.0
    """Weight of the SFT gradient."""
    rl_coef: float = 1.0
    """Weight of the RL gradient, > 0."""
    guess_tokens: int | None = None
    """Tokens at the end of a demonstration that SFT learns from; null: all."""

    def __post_init__(self) -> None:
        if not (self.sft_coef >= 0 and self.rl_coef > 0):
            raise ValueError(
                f"sft_coef={self.sft_coef!r}, rl_coef={self.rl_coef!r}: use numbers >= 0 and > 0"
            )

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demo_tokens=self.guess_tokens)

    def closed_form(self, gram: Gram) -> Weights | None:
        return (0.0 if gram.dot < 0 else self.sft_coef), self.rl_coef
