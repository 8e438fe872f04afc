"""Weights computed from the losses (SFT, RL) only; pass losses averaged over all ranks.

A GRPO surrogate is near 0 on-policy and changes sign: pass 1 - mean reward, or the surrogate minus
a lower bound. States are named tuples of numbers and restore from JSON by `State(*x)`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gac.control.checks import is_count, is_real, require

from .gram import Weights

Losses = tuple[float, float]
EPSILON = 1e-8  # avoids division by a loss of exactly 0


def uncertainty_weights(log_variances: Losses) -> Weights:
    """Uncertainty weighting (arXiv 1705.07115): w_i = exp(-s_i) / 2; start with s = (0, 0)."""
    s, r = log_variances
    return 0.5 * math.exp(-s), 0.5 * math.exp(-r)


def uncertainty_step(
    log_variances: Losses, losses: Losses, *, lr: float = 0.025, bound: float = 6.0
) -> Losses | None:
    """One gradient step on s for sum_i exp(-s_i) L_i / 2 + s_i / 2; the fixed point is exp(s) = L.

    bound: s is clipped to [-bound, bound], in case a loss reaches 0. Returns None if a loss is not
        finite.
    """
    require(is_real(lr) and lr >= 0, "lr", lr, "a finite number >= 0")
    require(is_real(bound) and bound > 0, "bound", bound, "a finite number > 0")
    if not all(map(math.isfinite, losses)):
        return None
    s, r = (
        min(max(s - lr * 0.5 * (1 - math.exp(-s) * loss), -bound), bound)
        for s, loss in zip(log_variances, losses, strict=True)
    )
    return s, r


class DWAState(NamedTuple):
    """State of dynamic weight average: the current window and the last two window means."""

    sums: Losses = (0.0, 0.0)
    """Sums of the losses in the current window."""
    steps: int = 0
    """Number of steps in the current window."""
    newer: Losses | None = None
    """Means of the last full window."""
    older: Losses | None = None
    """Means of the full window before that."""


def dwa_weights(state: DWAState, temperature: float = 2.0) -> Weights:
    """DWA's weights, w_i = 2 softmax(newer / older / temperature) (arXiv 1803.10704).

    Returns (1, 1) until two windows are complete.
    """
    require(is_real(temperature) and temperature > 0, "temperature", temperature, "a number > 0")
    if state.newer is None or state.older is None:
        return 1.0, 1.0
    s, r = (
        (new + EPSILON) / (old + EPSILON) for new, old in zip(state.newer, state.older, strict=True)
    )
    share = _softmax(s / temperature, r / temperature)
    return 2 * share[0], 2 * share[1]


def dwa_step(state: DWAState, losses: Losses, window: int = 25) -> DWAState | None:
    """Update the state with the losses (>= 0) of a step.

    They are averaged over `window` steps; the paper averages over an epoch.

    Returns None if a loss is not finite. Raises ValueError on a negative loss, whose ratio is
    meaningless.
    """
    require(is_count(window, 1), "window", window, "an integer >= 1")
    if not all(map(math.isfinite, losses)):
        return None
    require(min(losses) >= 0, "losses", losses, "losses >= 0 (for RL: 1 - mean reward)")
    sums = state.sums[0] + losses[0], state.sums[1] + losses[1]
    steps = state.steps + 1
    if steps < window:
        return state._replace(sums=sums, steps=steps)
    return DWAState(newer=(sums[0] / steps, sums[1] / steps), older=state.newer)


class FAMOState(NamedTuple):
    """FAMO's logits and the moments of their Adam optimizer."""

    logits: Losses = (0.0, 0.0)
    first: Losses = (0.0, 0.0)
    second: Losses = (0.0, 0.0)
    steps: int = 0


def famo_weights(state: FAMOState, losses: Losses, minimum: Losses = (0.0, 0.0)) -> Weights | None:
    """FAMO's weights, proportional to softmax(logits)_i / (L_i - minimum_i) (arXiv 2306.03792).

    The weights sum to 1. Returns None if a loss is not finite. Raises ValueError if a loss is below
    its minimum.
    """
    gaps = _gaps(losses, minimum)
    if gaps is None:
        return None
    z = _softmax(*state.logits)
    s, r = z[0] / gaps[0], z[1] / gaps[1]
    return s / (s + r), r / (s + r)


def famo_step(
    state: FAMOState,
    before: Losses,
    after: Losses,
    minimum: Losses = (0.0, 0.0),
    *,
    lr: float = 0.025,
    decay: float = 1e-3,
) -> FAMOState | None:
    """One Adam step on the logits, from the decrease of both losses on one batch.

    before, after: losses of one batch before and after the optimizer step.
    decay: weight decay of the logits, added to their gradient. Returns None if a loss is not
        finite.
    """
    require(is_real(lr) and lr >= 0, "lr", lr, "a finite number >= 0")
    require(is_real(decay) and decay >= 0, "decay", decay, "a finite number >= 0")
    old, new = _gaps(before, minimum), _gaps(after, minimum)
    if old is None or new is None:
        return None
    z = _softmax(*state.logits)
    decrease = [math.log(x) - math.log(y) for x, y in zip(old, new, strict=True)]
    mean = z[0] * decrease[0] + z[1] * decrease[1]
    steps = state.steps + 1
    rows = []
    for i in (0, 1):
        gradient = z[i] * (decrease[i] - mean) + decay * state.logits[i]
        first = 0.9 * state.first[i] + 0.1 * gradient
        second = 0.999 * state.second[i] + 0.001 * gradient**2
        size = math.sqrt(second / (1 - 0.999**steps)) + 1e-8
        rows.append((state.logits[i] - lr * first / (1 - 0.9**steps) / size, first, second))
    logits, firsts, seconds = zip(*rows, strict=True)
    return FAMOState(logits, firsts, seconds, steps)


def _gaps(losses: Losses, minimum: Losses) -> Losses | None:
    if not all(map(math.isfinite, (*losses, *minimum))):
        return None
    s, r = (loss - low for loss, low in zip(losses, minimum, strict=True))
    require(min(s, r) >= 0, "losses", losses, f"losses that are at least minimum={minimum!r}")
    return s + EPSILON, r + EPSILON


def _softmax(x: float, y: float) -> Weights:
    top = max(x, y)
    a, b = math.exp(x - top), math.exp(y - top)
    return a / (a + b), b / (a + b)
