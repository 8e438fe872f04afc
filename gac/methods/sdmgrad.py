"""SDMGrad: MGDA on two independent batch halves, with weights pulled towards a preference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gac.control.solvers import Weights, cross_gram, sdmgrad

from .base import Mix, State, StepNeeds
from .gram_solver import GramSolver


@dataclass(frozen=True)
class SDMGrad(GramSolver):
    """MGDA whose inner products come from two independent halves of the batch.

    The publication draws three batches per step; here the halves give the weights and their mean
    gives the direction, without an extra backward pass. The inner loop is solved exactly.
    """

    name: ClassVar[str] = "sdmgrad"
    source: ClassVar[str] = "arXiv 2305.18409"
    cost: ClassVar[str] = "three more gradient buffers"

    regularization: float = 0.3
    """Pull towards the preference, >= 0; 0 is MGDA."""
    preference: tuple[float, float] = (0.5, 0.5)
    """Shares of SFT and RL, >= 0."""

    def __post_init__(self) -> None:
        if self.unit_rl:
            raise ValueError(
                "unit_rl=True is not supported: the RL gradients of the two halves have different "
                "norms; use false"
            )
        identity = ((1.0, 0.0), (0.0, 1.0))
        sdmgrad(identity, self.regularization, self.preference)  # raises on a value out of range

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=2)

    def solve(self, state: State, gram: torch.Tensor, mix: Mix) -> tuple[State, Weights | None]:
        weights = sdmgrad(cross_gram(gram, 2), self.regularization, self.preference)
        return {**state, "skipped": state["skipped"] + (weights is None)}, weights
