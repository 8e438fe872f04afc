"""Base class for loss weighting, with a positive loss for each term."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac.control.term_pair import Pair
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Observation

LEAST = 1e-3  # lower bound of a loss, so that ratios are finite


def positive_losses(last: Observation) -> Pair | None:
    """(demonstration loss, 1 - mean reward), each at least 1e-3; None before the first step.

    The policy-gradient surrogate is near 0 and changes sign, so it does not measure progress. The
    publications have no such term; 1 - mean reward is our choice, for rewards in [0, 1].
    """
    if last.demo_loss is None or last.reward_mean is None:
        return None
    return Pair(max(last.demo_loss, LEAST), max(1 - last.reward_mean, LEAST))


@dataclass(frozen=True)
class LossWeights(Method):
    """Weights from the history of the two losses."""

    family: ClassVar[str] = "loss weighting"

    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight))
