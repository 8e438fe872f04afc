"""Aligned-MTL: combines the gradients after making them orthogonal and of equal norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from gac.control.checks import require

from .base import Weights
from .gram_solver import Gram, GramSolver, check_preference

PARALLEL = 1e-12  # 1 - cosine^2 below this: the Gram matrix has rank 1


@dataclass(frozen=True)
class AlignedMTL(GramSolver):
    """Preference-weighted sum of the gradients after their principal components are equalized.

    w = sqrt(scale) G^(-1/2) preference. With parallel gradients or one zero gradient, only the
    component along their common direction remains; two zero gradients give the preference. Weights
    may be negative, so an update may raise one of the two losses.
    """

    name: ClassVar[str] = "aligned-mtl"
    source: ClassVar[str] = "arXiv 2305.19000"

    mode: Literal["min", "rmse"] = "min"
    """Common scale of the components: the smallest eigenvalue of G (min) or their mean (rmse)."""
    preference: tuple[float, float] = (0.5, 0.5)
    """Shares of SFT and RL, >= 0."""

    def __post_init__(self) -> None:
        require(self.mode in ("min", "rmse"), "mode", self.mode, "one of min, rmse")
        check_preference(self.preference)

    def closed_form(self, gram: Gram) -> Weights:
        p, q = self.preference
        a, b, c = gram.unit()
        trace = a + c
        if trace == 0:
            return p, q
        det = a * c * (1 - gram.cosine**2)
        if det <= PARALLEL * a * c:  # G = trace v v^T: one nonzero eigenvalue, so both modes agree
            v_s, v_r = math.sqrt(a / trace), math.copysign(math.sqrt(c / trace), b)
            along = v_s * p + v_r * q
            return v_s * along, v_r * along
        root = math.sqrt(det)
        largest = 0.5 * (trace + math.hypot(a - c, 2 * b))
        common = det / largest if self.mode == "min" else trace / 2
        scale = math.sqrt(common / (trace + 2 * root)) / root
        return scale * ((c + root) * p - b * q), scale * ((a + root) * q - b * p)
