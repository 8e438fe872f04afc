"""Statistics for the report, as pure functions of step and value arrays."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

LARGE_CHANGE = 0.02
"""Threshold above which a change of mu over one controller interval is large, as in the paper."""


def finite(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep only the pairs with a finite value."""
    keep = np.isfinite(values)
    return steps[keep], values[keep]


def smooth(values: np.ndarray, span: float) -> np.ndarray:
    """Bias-corrected exponential moving average over about `span` values.

    y_t = sum_i d^(t-i) x_i / sum_i d^(t-i) with d = 1 - 2 / (span + 1); span <= 1 changes nothing.
    """
    decay = 1 - 2 / (max(span, 1.0) + 1)
    total = weight = 0.0
    result = np.empty(len(values))
    for i, value in enumerate(values):
        total, weight = decay * total + value, decay * weight + 1
        result[i] = total / weight
    return result


def kl_area(steps: np.ndarray, kl: np.ndarray) -> float:
    """Area under the KL curve over optimizer steps by the trapezoid rule; unit: nats x steps.

    Args:
        steps: [n] optimizer steps.
        kl: [n] KL at these steps, nats; non-finite values are ignored.

    Returns:
        The area; nan if no KL is finite.

    Source:
        The paper's tables 9 and 21.
    """
    steps, kl = finite(steps, kl)
    if not len(kl):
        return math.nan
    return float(np.trapezoid(kl, steps))


def large_mu_events(
    steps: np.ndarray, mu: np.ndarray, window: int, threshold: float = LARGE_CHANGE
) -> tuple[int, int]:
    """Count the windows over which mu changed by more than `threshold`.

    Windows are consecutive, starting at the first recorded step. A window counts only if mu is
    recorded at both ends.

    Args:
        steps: [n] optimizer steps.
        mu: [n] mu at these steps.
        window: length of a window, in steps.
        threshold: the change above which a window counts.

    Returns:
        (windows with such a change, total number of windows).
    """
    steps, mu = finite(steps, mu)
    if not len(mu):
        return 0, 0
    mu_at = dict(zip(steps.tolist(), mu.tolist(), strict=True))
    ends = np.arange(steps[0], steps[-1] + 1, window).tolist()
    pairs = [(mu_at.get(a), mu_at.get(b)) for a, b in pairwise(ends)]
    changes = [abs(b - a) for a, b in pairs if a is not None and b is not None]
    rounding = 1e-9  # a change equal to the threshold does not exceed it
    return sum(change > threshold + rounding for change in changes), len(changes)


def variance(values: np.ndarray) -> float:
    """Population variance of the finite values; nan if there are none."""
    values = values[np.isfinite(values)]
    return float(values.var()) if len(values) else math.nan


def total(values: np.ndarray) -> float:
    """Sum of the finite values; nan if there are none."""
    values = values[np.isfinite(values)]
    return float(values.sum()) if len(values) else math.nan


def final_and_best(steps: np.ndarray, values: np.ndarray) -> tuple[float, float, float]:
    """(last finite value, maximum, step of the first maximum); nan without finite values."""
    steps, values = finite(steps, values)
    if not len(values):
        return math.nan, math.nan, math.nan
    best = int(values.argmax())
    return float(values[-1]), float(values[best]), float(steps[best])


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of the finite values; the second is nan for one value."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return math.nan, math.nan
    return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else math.nan


def band(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(steps, mean, lowest, highest) of several curves over the steps that all of them cover.

    curves: nonempty (steps, values) pairs without nan, interpolated linearly between their steps.
    """
    if not curves:
        empty = np.empty(0)
        return empty, empty, empty, empty
    first, last = max(s[0] for s, _ in curves), min(s[-1] for s, _ in curves)
    grid = np.unique(np.concatenate([s for s, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    stack = np.stack([np.interp(grid, steps, values) for steps, values in curves])
    return grid, stack.mean(0), stack.min(0), stack.max(0)
