"""Aligned-MTL: combines the gradients after making them orthogonal and of equal norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gac.control.solvers import Gram, Weights, aligned_mtl

from .gram_solver import GramSolver


@dataclass(frozen=True)
class AlignedMTL(GramSolver):
    """Preference-weighted sum of the gradients after their principal components are equalized.

    Weights may be negative, so an update may raise one of the two losses.
    """

    name: ClassVar[str] = "aligned-mtl"
    source: ClassVar[str] = "arXiv 2305.19000"

    mode: Literal["min", "rmse"] = "min"
    """Common scale of the components: the smallest eigenvalue (min) or the mean (rmse)."""
    preference: tuple[float, float] = (0.5, 0.5)
    """Shares of SFT and RL, >= 0."""

    def closed_form(self, gram: Gram) -> Weights | None:
        return aligned_mtl(gram, self.mode, self.preference)
