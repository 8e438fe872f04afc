"""Nash-MTL: the Nash bargaining solution between the two terms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require

from .base import Weights
from .gram_solver import Gram, GramSolver

OPPOSITE = 1e-7  # 1 + cosine below this is float32 rounding error


@dataclass(frozen=True)
class NashMTL(GramSolver):
    """The Nash bargaining solution: an update along the bisector of the two gradients.

    G w = 1 / w is solved exactly, w_i = 1 / (|g_i| sqrt(1 + cos)), so the paper's number of inner
    steps has no effect. The update has norm sqrt(2) before `max_norm`. Opposite gradients have no
    solution; the weights stay bounded and the update goes to zero. A zero gradient gets weight 0,
    and the other gradient is normalized.
    """

    name: ClassVar[str] = "nash-mtl"
    source: ClassVar[str] = "arXiv 2202.01017"

    max_norm: float | None = 1.0
    """Largest norm of the update, as published; null: no limit, and the norm is sqrt(2)."""
    scale: float = 1.0
    """Scale of the update, the paper's "lr scale"; has almost no effect with AdamW."""

    def __post_init__(self) -> None:
        ok = self.max_norm is None or self.max_norm > 0
        require(ok, "max_norm", self.max_norm, "a number > 0, or None")
        require(self.scale > 0, "scale", self.scale, "a number > 0")

    def closed_form(self, gram: Gram) -> Weights:
        if gram.sft == 0 and gram.rl == 0:
            return 0.5 * self.scale, 0.5 * self.scale
        spread = math.sqrt(max(1 + gram.cosine, OPPOSITE))
        s, r = (1 / (math.sqrt(x) * spread) if x > 0 else 0.0 for x in (gram.sft, gram.rl))
        norm = gram.norm_of((s, r))
        limit = math.inf if self.max_norm is None or norm == 0 else self.max_norm / norm
        factor = min(1.0, limit)
        return self.scale * (s * factor), self.scale * (r * factor)
