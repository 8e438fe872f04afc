"""TRAPO: rollouts that continue increasingly long prefixes of a demonstration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from gac.errors import require
from gac.rollouts.plan import Sampling, Stage
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State


@dataclass(frozen=True)
class TRAPO(Method):
    """Micro-groups of rollouts; after low rewards, the next group continues a demonstration prefix.

    Prefix tokens are trained by trust-region SFT with loss -p / max(p, c). The policy's own tokens
    are trained by RL, with advantages centered over the whole group and no clipping. All sums are
    divided by `loss.max_tokens`. Prefixes may end at any token rather than at a paragraph, and all
    micro-groups use the same demonstration.
    """

    name: ClassVar[str] = "trapo"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2512.17636"

    sizes: tuple[int, ...] = (4, 2, 1, 1)
    """Rollouts of each micro-group; their sum must be `rollouts.num_generations`."""
    prefixes: tuple[float, ...] = (0.0, 0.2, 0.5, 1.0)
    """Fraction of the demonstration given to each micro-group as a prefix."""
    below: tuple[float, ...] = (-1.0, 0.5, 0.7, 0.9)
    """The prefix is given only if the mean reward so far is below this."""
    trained: tuple[int, ...] = (0, 1, 1, 1)
    """Number of rollouts per micro-group whose prefix is trained on, as in the released code."""
    trust: float = 0.1
    """c of the trust-region SFT, the publication's alpha."""

    def __post_init__(self) -> None:
        counts = {len(self.sizes), len(self.prefixes), len(self.below), len(self.trained)}
        if len(counts) != 1 or not self.sizes or min(self.sizes) < 1:
            raise ValueError(
                f"sizes={self.sizes!r}: use numbers >= 1; the lists `sizes`, `prefixes`, `below` "
                "and `trained` must have the same length"
            )
        require(
            all(0 <= x <= 1 for x in self.prefixes),
            "prefixes",
            self.prefixes,
            "fractions in [0, 1]",
        )

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(
            base,
            demo_weight=DemoWeight.TRUST,
            demo_shape=self.trust,
            clip_low=None,
            clip_high=None,
            rollout_reduction="constant",
            demo_reduction="constant",
        )
        return Loss(spec, pooled=True)

    def sampling(self, completions: int) -> Sampling:
        if sum(self.sizes) != completions:
            raise ValueError(
                f"rollouts.num_generations={completions!r}: use {sum(self.sizes)}, the sum of "
                f"method.sizes={self.sizes!r}, or change the sizes"
            )
        rows = zip(self.sizes, self.prefixes, self.below, self.trained, strict=True)
        stages = [
            Stage(size, prefix, below if prefix else math.inf, trained)
            for size, prefix, below, trained in rows
        ]
        return Sampling("prompt", tuple(stages), advantages="centered")

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(1.0, 1.0)
