"""CAGrad: the best worst-case descent near the mean gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import Gram, Weights, cagrad

from .gram_solver import GramSolver


@dataclass(frozen=True)
class CAGrad(GramSolver):
    """The direction with the best worst-case descent within a ball around the mean gradient."""

    name: ClassVar[str] = "cagrad"
    source: ClassVar[str] = "arXiv 2110.14048"

    radius: float = 0.5
    """Radius of the ball in units of the mean gradient's norm, >= 0: the publication's c."""
    rescale: int = 0
    """0: none; 1: divide by 1 + radius^2; 2: by 1 + radius."""

    def closed_form(self, gram: Gram) -> Weights | None:
        return cagrad(gram, self.radius, self.rescale)
