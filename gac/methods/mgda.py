"""MGDA: the shortest convex combination of the two gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import Gram, Weights, mgda

from .gram_solver import GramSolver


@dataclass(frozen=True)
class MGDA(GramSolver):
    """The shortest convex combination of the two gradients, which descends on both terms.

    The paper's number of Frank-Wolfe iterations has no effect for two objectives: one is exact.
    """

    name: ClassVar[str] = "mgda"
    source: ClassVar[str] = "arXiv 1810.04650"

    def closed_form(self, gram: Gram) -> Weights | None:
        return mgda(gram)
