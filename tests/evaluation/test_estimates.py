"""Estimates and their intervals, checked by enumeration and simulation."""

import math
import re
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from gac.evaluation.estimates import (
    Z95,
    accuracy_interval,
    bootstrap_interval,
    paired_difference,
    pass_at_k,
)


@pytest.mark.parametrize(("samples", "correct"), [(1, 0), (1, 1), (5, 2), (6, 6), (7, 0), (8, 3)])
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_sample(samples, correct):
    right = [True] * correct + [False] * (samples - correct)
    for k in range(1, samples + 1):
        subsets = list(combinations(right, k))
        assert pass_at_k(samples, correct, k) == pytest.approx(
            sum(map(any, subsets)) / len(subsets), abs=1e-12
        )


def test_pass_at_k_is_accurate_for_many_samples():
    assert pass_at_k(2000, 10, 10) == pytest.approx(
        1 - math.prod(1 - 10 / n for n in range(2000 - 10 + 1, 2001)), rel=1e-9
    )


@pytest.mark.parametrize(
    ("correct", "k", "message"),
    [(2, k, f"k={k}: use a number in [1, 4]") for k in (0, 5, -1)]
    + [(correct, 2, f"correct={correct}: use a number in [0, 4]") for correct in (-1, 5)],
)
def test_pass_at_k_rejects_numbers_out_of_range(correct, k, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pass_at_k(4, correct, k)


def test_wilson_by_hand():
    # n = 10, p = 0.4: the textbook interval
    low, high = accuracy_interval([1.0] * 4 + [0.0] * 6)
    assert (low, high) == pytest.approx((0.1682, 0.6873), abs=1e-4)
    for count in range(1, 200):  # exactly, whatever the rounding
        assert accuracy_interval([0.0] * count)[0] == 0
        assert accuracy_interval([1.0] * count)[1] == 1
    assert accuracy_interval([0.0] * 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert accuracy_interval([1.0] * 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert all(map(math.isnan, accuracy_interval([])))
    # n = 3, p = 0.7; rounding gives three times 0.7 a variance of 2e-32
    assert accuracy_interval([0.7] * 3) == pytest.approx((0.2264, 0.9490), abs=1e-4)


@pytest.mark.parametrize("wrong", [1.5, -0.5, math.nan])
def test_wilson_rejects_scores_outside_of_0_to_1(wrong):
    with pytest.raises(ValueError, match=f"{wrong}.*in \\[0, 1\\]"):
        accuracy_interval([0.0, 1.0, wrong])


@pytest.mark.parametrize(
    ("prompts", "samples", "mean", "min_coverage"),
    [(30, 1, 0.1, 0.93), (30, 8, 0.1, 0.88), (200, 4, 0.5, 0.93)],
)
def test_wilson_covers_the_truth(prompts, samples, mean, min_coverage):
    """Prompts differ in difficulty; an interval that treats samples of one prompt as independent
    covers less often.
    """
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(1000):
        means = rng.binomial(samples, rng.beta(mean, 1 - mean, prompts)) / samples
        low, high = accuracy_interval(means.tolist())
        covered += low <= mean <= high
        flat = np.repeat(means.mean(), prompts * samples)
        half = 1.96 * math.sqrt(flat[0] * (1 - flat[0]) / len(flat))
        naive += flat[0] - half <= mean <= flat[0] + half
    assert covered / 1000 >= min_coverage
    assert samples == 1 or naive < covered


def test_bootstrap_of_binary_values_is_binomial():
    """15 of 60: the number in a resample is 9 at the 2.5% quantile and 22 at the 97.5% one."""
    assert bootstrap_interval([0.0] * 45 + [1.0] * 15) == (9 / 60, 22 / 60)


def test_paired_difference_is_narrower_than_two_intervals():
    rng = np.random.default_rng(2)
    hard = rng.normal(0, 1, 100)
    first, second = hard + 0.2 + rng.normal(0, 0.1, 100), hard
    difference = paired_difference(first.tolist(), second.tolist())
    assert difference.pairs == 100
    assert difference.difference == pytest.approx(0.2, abs=0.03)
    assert 0 < difference.ci95[0] < difference.difference < difference.ci95[1] < 0.3
    with pytest.raises(ValueError, match="3 and 2 values"):
        paired_difference([1, 2, 3], [1, 2])


def test_one_pair_has_no_interval_but_two_have():
    assert all(map(math.isnan, paired_difference([1.0], [0.0]).ci95))
    assert paired_difference([True, True], [False, True]) == (0.5, (0.0, 1.0), 2)


def test_accuracy_interval_uses_the_sample_variance():
    """Means 0, 0.5, 1, 0.5: variance with n - 1 is 1/6, so the effective size is 0.25 * 6 * 4."""
    square = Z95 * Z95 / 6
    half = Z95 / (1 + square) * math.sqrt(0.25 / 6 + square / 24)
    low, high = accuracy_interval([0.0, 0.5, 1.0, 0.5])
    assert low == pytest.approx(0.5 - half, abs=1e-12)
    assert high == pytest.approx(0.5 + half, abs=1e-12)


def test_two_values_have_intervals():
    """Means 0.5 and 1: variance 1/8, so the effective size is 0.75 * 0.25 * 8 * 2 = 3."""
    square = Z95 * Z95 / 3
    half = Z95 / (1 + square) * math.sqrt(0.1875 / 3 + square / 12)
    middle = (0.75 + square / 2) / (1 + square)
    expected = (middle - half, min(middle + half, 1.0))
    assert accuracy_interval([0.5, 1.0]) == pytest.approx(expected, abs=1e-12)
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)


@pytest.mark.parametrize(("count", "chunks"), [(3, 1), (900, 3)])
def test_bootstrap_uses_every_resample(count, chunks, monkeypatch):
    """In chunks of limited size."""
    empty, draws = np.empty, []
    integers = np.random.default_rng(0).integers

    def record(*arguments, size):
        draws.append(size)
        return integers(*arguments, size=size)

    monkeypatch.setattr(np.random, "default_rng", {0: SimpleNamespace(integers=record)}.get)

    def poisoned(shape, *dtype, **options):
        array = empty(shape, *dtype, **options)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", poisoned)
    assert bootstrap_interval([2.0] * count) == (2.0, 2.0)
    assert len(draws) == chunks
    assert sum(rows for rows, _ in draws) == 10_000
