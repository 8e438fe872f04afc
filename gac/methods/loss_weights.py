"""Base class of the methods that weight the terms by their losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac.control.term_pair import TermPair
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Observation

MIN_LOSS = 1e-3  # lower bound of a loss, so that ratios are finite


def positive_losses(last: Observation) -> TermPair | None:
    """(demonstration loss, 1 - mean reward), each at least MIN_LOSS; None before the first step.

    The policy-gradient surrogate is near 0 and changes sign, so it does not measure progress. The
    publications have no such term; 1 - mean reward is our choice, for rewards in [0, 1].
    """
    if last.demo_loss is None or last.reward_mean is None:
        return None
    return TermPair(max(last.demo_loss, MIN_LOSS), max(1 - last.reward_mean, MIN_LOSS))


@dataclass(frozen=True)
class LossWeights(Method):
    """Weights from the history of the two losses."""

    family: ClassVar[str] = "loss weighting"

    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight))
