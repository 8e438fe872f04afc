"""Nash-MTL: the Nash bargaining solution between the two terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import Gram, Weights, nash_mtl
from gac.errors import require

from .gram_solver import GramSolver


@dataclass(frozen=True)
class NashMTL(GramSolver):
    """The Nash bargaining solution: an update along the bisector of the two gradients.

    The solution is exact here, so the paper's number of inner steps has no effect.
    """

    name: ClassVar[str] = "nash-mtl"
    source: ClassVar[str] = "arXiv 2202.01017"

    max_norm: float | None = 1.0
    """Largest norm of the update, as published; null: no limit, and the norm is sqrt(2)."""
    scale: float = 1.0
    """Scale of the update, the paper's "lr scale"; has almost no effect with AdamW."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.scale > 0, "scale", self.scale, "a number > 0")

    def closed_form(self, gram: Gram) -> Weights | None:
        weights = nash_mtl(gram, self.max_norm)
        return None if weights is None else (self.scale * weights[0], self.scale * weights[1])
