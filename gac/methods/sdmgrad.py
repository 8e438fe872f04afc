"""SDMGrad: MGDA on two independent batch halves, with weights pulled towards a preference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Mix, State, StepNeeds, Weights
from .gram_solver import Cross, GramSolver, check_nonnegative, check_preference, cross_gram


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
        check_nonnegative(self, "regularization")
        check_preference(self.preference)

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=2)

    def from_halves(self, products: Cross) -> Weights | None:
        """The weights from the inner products of the halves; None if one is not finite.

        The inner loop looks for w = (x, 1 - x) at which the two components of A (w + lambda p) are
        equal, a linear equation in x. A noisy A may have no stable interior solution; the result is
        then the end point that (0.5, 0.5) moves towards.
        """
        (a_ss, a_sr), (a_rs, a_rr) = products
        if not all(map(math.isfinite, (a_ss, a_sr, a_rs, a_rr))):
            return None
        p, q = (self.regularization * part for part in self.preference)
        rise_s, rise_r = a_ss - a_rs, a_sr - a_rr
        at_zero, slope = rise_s * p + rise_r * (1 + q), rise_s - rise_r
        if slope > 0:
            x = min(max(-at_zero / slope, 0.0), 1.0)
        else:
            push = at_zero + 0.5 * slope
            x = 0.5 if push == 0 else float(push < 0)
        total = 1 + p + q
        return (x + p) / total, (1 - x + q) / total

    def solve(self, state: State, gram: torch.Tensor, mix: Mix) -> tuple[State, Weights | None]:
        weights = self.from_halves(cross_gram(gram, 2))
        return {**state, "skipped": state["skipped"] + (weights is None)}, weights
