"""Base class of the gradient solvers: two gradients per step, weights from their inner products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gac.control.solvers import Gram, Weights, with_unit_rl

from .base import Mix, Observation, State, StepNeeds, TokenWeighted


@dataclass(frozen=True)
class GramSolver(TokenWeighted):
    """Weights the two gradients by a function of their inner products."""

    family: ClassVar[str] = "gradient solver"
    cost: ClassVar[str] = "second gradient buffer"

    unit_rl: bool = False
    """Divide the RL gradient by its norm first, as the paper's baselines do."""

    def __post_init__(self) -> None:
        self.weights(self.init(), Gram(1.0, 0.0, 1.0))  # raises on a value out of range

    def init(self) -> State:
        return {"skipped": 0, "cosine": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.5)  # only logged for a skipped step; otherwise `solve` replaces it

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=1)

    def weights(self, state: State, gram: Gram) -> tuple[State, Weights | None]:
        """Return the new state, and the weights of the method's paper (None if not finite)."""
        return state, self.closed_form(gram)

    def closed_form(self, gram: Gram) -> Weights | None:
        """The weights of a stateless solver."""
        raise NotImplementedError

    def solve(self, state: State, gram: torch.Tensor, mix: Mix) -> tuple[State, Weights | None]:
        pair, after = Gram.of_means(gram, len(gram) // 2), state
        if not pair.usable:
            return {**state, "skipped": state["skipped"] + 1}, None

        def solver(gram: Gram) -> Weights | None:
            nonlocal after
            after, weights = self.weights(state, gram)
            return weights

        weights = with_unit_rl(solver, pair) if self.unit_rl else solver(pair)
        skipped = after["skipped"] + (weights is None)
        return {**after, "skipped": skipped, "cosine": pair.cosine}, weights

    def report(self, state: State) -> dict[str, float | None]:
        return {"cosine": state["cosine"], "solver_skipped": state["skipped"]}
