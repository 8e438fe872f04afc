"""Base class of the methods that weight the terms by their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

from gac.control.term_pair import TermPair

from .base import Observation, State, TokenWeighted

Solver = TypeVar("Solver")  # the state of a solver, a named tuple
MIN_LOSS = 1e-3  # lower bound of a loss, so that ratios are finite


def positive_losses(last: Observation) -> TermPair | None:
    """(demonstration loss, 1 - mean reward), each at least MIN_LOSS; None before the first step.

    The policy-gradient surrogate is near 0 and changes sign, so it does not measure progress. The
    publications have no such term; 1 - mean reward is our choice, for rewards in [0, 1].
    """
    if last.demo_loss is None or last.reward_mean is None:
        return None
    return TermPair(max(last.demo_loss, MIN_LOSS), max(1 - last.reward_mean, MIN_LOSS))


def to_plain(state: NamedTuple) -> State:
    """A solver's state in plain JSON types."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in state._asdict().items()}


def from_plain(kind: Callable[..., Solver], plain: State) -> Solver:
    """Inverse of `to_plain`, for a state of type `kind`."""
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()})


@dataclass(frozen=True)
class LossWeights(TokenWeighted):
    """Weights from the history of the two losses."""

    family: ClassVar[str] = "loss weighting"
