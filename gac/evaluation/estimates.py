"""Estimates with intervals: pass@k, accuracy over prompts, differences of paired scores.

Samples of one prompt are not independent, so every estimate treats a prompt as one unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Z95 = NormalDist().inv_cdf(0.975)
BOOTSTRAP_RESAMPLES = 10_000


class Difference(NamedTuple):
    """A mean paired difference and its 95% interval."""

    difference: float
    ci95: tuple[float, float]
    pairs: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` responses is correct.

    The responses are drawn without replacement from `samples`. The result equals 1 - C(n - c, k) /
    C(n, k) for c correct out of n responses; unbiased for k fresh samples.

    Raises:
        ValueError: k is outside [1, samples], or correct is outside [0, samples].

    Source:
        arXiv 2107.03374, equation 1.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k={k!r}: use a number in [1, {samples}], the samples per prompt")
    if not 0 <= correct <= samples:
        raise ValueError(f"correct={correct!r}: use a number in [0, {samples}]")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def accuracy_interval(means: Sequence[float]) -> tuple[float, float]:
    """95% Wilson interval of the mean score over prompts.

    The effective sample size is n p (1 - p) / variance, but at least n. It equals n for one binary
    sample per prompt or equal means, and grows with the number of samples per prompt.

    Args:
        means: the mean score of each prompt, in [0, 1].

    Returns:
        (low, high); (nan, nan) without prompts.

    Raises:
        ValueError: a score outside of [0, 1].

    Source:
        Wilson 1927; effective sample size for clustered samples: Kish 1965.
    """
    values = np.asarray(means)
    n = len(values)
    if not n:
        return math.nan, math.nan
    outside = values[~((values >= 0) & (values <= 1))]
    if outside.size:
        raise ValueError(f"means has {outside[0]!r}: a Wilson interval requires scores in [0, 1]")
    p, size = float(values.mean()), float(n)
    if values.min() < values.max():  # rounding gives equal values a tiny variance
        size = max(size, float(n * p * (1 - p) / values.var(ddof=1)))
    square = Z95 * Z95 / size
    middle = (p + square / 2) / (1 + square)
    half = Z95 / (1 + square) * math.sqrt(p * (1 - p) / size + square / (4 * size))
    # exact at the ends, where rounding would leave 6.9e-18 or 1 - 2e-16
    return max(middle - half, 0.0) if p > 0 else 0.0, min(middle + half, 1.0) if p < 1 else 1.0


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean; (nan, nan) for fewer than two values."""
    data = np.asarray(values)
    if len(data) < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    means = np.empty(BOOTSTRAP_RESAMPLES)
    chunk = 1 + 4_000_000 // len(data)  # 32 MB of indices at a time
    for start in range(0, BOOTSTRAP_RESAMPLES, chunk):
        count = min(chunk, BOOTSTRAP_RESAMPLES - start)
        rows = rng.integers(len(data), size=(count, len(data)))
        means[start : start + count] = data[rows].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Mean of first - second over pairs (prompts, or seeds), with its 95% bootstrap interval.

    Raises:
        ValueError: the two differ in length.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values cannot be paired")
    gaps = np.subtract(first, second, dtype=float)
    mean = float(gaps.mean()) if len(gaps) else math.nan
    return Difference(mean, bootstrap_interval(gaps.tolist()), len(gaps))
