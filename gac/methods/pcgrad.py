"""PCGrad: removes the conflicting component of each gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import Gram, Weights, pcgrad

from .gram_solver import GramSolver


@dataclass(frozen=True)
class PCGrad(GramSolver):
    """Sum of the gradients; if they conflict, each first loses its component along the other."""

    name: ClassVar[str] = "pcgrad"
    source: ClassVar[str] = "arXiv 2001.06782"

    threshold: float = 0.0
    """The cosine below which gradients conflict, in [-1, 1]; the paper tries -0.2, 0 and 0.2."""

    def closed_form(self, gram: Gram) -> Weights | None:
        return pcgrad(gram, self.threshold)
