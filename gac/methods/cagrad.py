"""CAGrad: the best worst-case descent near the mean gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.control.checks import require

from .base import Weights
from .gram_solver import Gram, GramSolver, check_nonnegative

OPPOSITE = 1e-7  # relative norm below which gradients cancel, in float32


@dataclass(frozen=True)
class CAGrad(GramSolver):
    """The direction with the best worst-case descent within a ball around the mean gradient.

    Minimizes g_w . g_0 + radius |g_0| |g_w| over g_w = x g_s + (1 - x) g_r, with the mean gradient
    g_0. If g_w vanishes (one gradient is zero, or opposite gradients cancel within the radius), no
    direction descends on both; the weights are then (0.5, 0.5) if one gradient is zero, else 0.
    """

    name: ClassVar[str] = "cagrad"
    source: ClassVar[str] = "arXiv 2110.14048"

    radius: float = 0.5
    """Radius of the ball in units of the mean gradient's norm, >= 0: the publication's c."""
    rescale: int = 0
    """0: none; 1: divide by 1 + radius^2; 2: by 1 + radius."""

    def __post_init__(self) -> None:
        check_nonnegative(self, "radius")
        require(self.rescale in (0, 1, 2), "rescale", self.rescale, "0, 1 or 2")

    def closed_form(self, gram: Gram) -> Weights:
        a, b, c = gram.unit()
        scale = (1.0, 1 + self.radius**2, 1 + self.radius)[self.rescale]
        reach = self.radius * 0.5 * math.sqrt(max(a + 2 * b + c, 0.0))  # radius |g_0|
        gap = a + c - 2 * b
        if reach == 0 or a == 0 or c == 0 or gap <= 0:
            pull = self.radius if gap <= 0 and a > 0 else 0.0  # equal gradients: g_w is constant
            return (0.5 + 0.5 * pull) / scale, (0.5 + 0.5 * pull) / scale
        slope = 0.5 * (a - c) / (reach * math.sqrt(gap))
        if abs(slope) >= 1:
            x = float(slope < 0)
        else:
            height = math.sqrt(max(a * c - b * b, 0.0) / (1 - slope**2))
            x = min(max((c - b - slope * height) / gap, 0.0), 1.0)
        norm = gram.unit().norm_of((x, 1 - x))
        if norm <= OPPOSITE * reach:
            return 0.0, 0.0
        pull = reach / norm
        return (0.5 + pull * x) / scale, (0.5 + pull * (1 - x)) / scale
