"""Base class of the methods that weight the terms by their losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.control.term_pair import TermPair

from .base import Observation, TokenWeighted, Weights

MIN_LOSS = 1e-3  # lower bound of a loss, so that ratios are finite
EPSILON = 1e-8  # avoids division by a loss of exactly 0


def positive_losses(last: Observation) -> TermPair | None:
    """(demonstration loss, 1 - mean reward), each at least MIN_LOSS.

    None before the first step, or if one is not finite. The policy-gradient surrogate is near 0 and
    changes sign, so it does not measure progress. The publications have no such term; 1 - mean
    reward is our choice, for rewards in [0, 1].
    """
    if last.demo_loss is None or last.reward_mean is None:
        return None
    losses = TermPair(max(last.demo_loss, MIN_LOSS), max(1 - last.reward_mean, MIN_LOSS))
    return losses if all(map(math.isfinite, losses)) else None


def softmax(x: float, y: float) -> Weights:
    """The softmax of two numbers."""
    top = max(x, y)
    a, b = math.exp(x - top), math.exp(y - top)
    return a / (a + b), b / (a + b)


@dataclass(frozen=True)
class LossWeights(TokenWeighted):
    """Weights from the history of the two losses."""

    family: ClassVar[str] = "loss weighting"
