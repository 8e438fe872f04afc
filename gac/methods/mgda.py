"""MGDA: the shortest convex combination of the two gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Weights
from .gram_solver import Gram, GramSolver


@dataclass(frozen=True)
class MGDA(GramSolver):
    """The shortest convex combination of the two gradients, which descends on both terms.

    Frank-Wolfe finds it in one step for two objectives, so the paper's number of iterations has no
    effect. A zero gradient gets all the weight: the point is Pareto-stationary.
    """

    name: ClassVar[str] = "mgda"
    source: ClassVar[str] = "arXiv 1810.04650"

    def closed_form(self, gram: Gram) -> Weights:
        a, b, c = gram.unit()
        gap = a + c - 2 * b
        w = min(max((c - b) / gap, 0.0), 1.0) if gap > 0 else 0.5
        return w, 1 - w
