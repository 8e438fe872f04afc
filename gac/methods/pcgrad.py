"""PCGrad: removes the conflicting component of each gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.control.checks import is_real, require

from .base import Weights
from .gram_solver import Gram, GramSolver


@dataclass(frozen=True)
class PCGrad(GramSolver):
    """Sum of the gradients; if they conflict, each first loses its component along the other."""

    name: ClassVar[str] = "pcgrad"
    source: ClassVar[str] = "arXiv 2001.06782"

    threshold: float = 0.0
    """The cosine below which gradients conflict, in [-1, 1]; the paper tries -0.2, 0 and 0.2."""

    def __post_init__(self) -> None:
        inside = is_real(self.threshold) and -1 <= self.threshold <= 1
        require(inside, "threshold", self.threshold, "a cosine in [-1, 1]")

    def closed_form(self, gram: Gram) -> Weights:
        if gram.cosine >= self.threshold or gram.sft == 0 or gram.rl == 0:
            return 1.0, 1.0
        ratio = math.sqrt(gram.rl) / math.sqrt(gram.sft)
        return 1 - gram.cosine * ratio, 1 - gram.cosine / ratio
