"""GradNorm-ctrl: mu is the SFT gradient's share of the two gradient norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require

from .base import Mix, Observation, State, StepNeeds, Weights
from .gram_solver import Gram, GramSolver


@dataclass(frozen=True)
class GradNormControl(GramSolver):
    """mu = |g_s| / (|g_s| + |g_r|), measured every `update_every` steps.

    This favors the larger gradient, the opposite of balancing; set `invert` to balance.
    """

    name: ClassVar[str] = "gradnorm-ctrl"
    family: ClassVar[str] = "rule"
    source: ClassVar[str] = "the paper, appendix I (rule-based controllers)"
    cost: ClassVar[str] = "second gradient buffer, on measurement steps"

    update_every: int = 10
    """Steps between measurements; mu is constant in between."""
    invert: bool = False
    """Use mu = |g_r| / (|g_s| + |g_r|) instead."""

    def __post_init__(self) -> None:
        require(self.update_every >= 1, "update_every", self.update_every, "a number >= 1")
        if self.unit_rl:
            raise ValueError("unit_rl=True: use false; this rule compares the gradient norms")

    def init(self) -> State:
        return {**super().init(), "mu": 0.5}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(state["mu"])

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=int(step % self.update_every == 0))

    def weights(self, state: State, gram: Gram) -> tuple[State, Weights | None]:
        sft, rl = math.sqrt(gram.sft), math.sqrt(gram.rl)
        if sft + rl > 0:
            mu = (rl if self.invert else sft) / (sft + rl)
            state = {**state, "mu": mu}
        return state, Mix(state["mu"]).pair
