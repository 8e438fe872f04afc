"""The simulation of Proposition 1 against closed forms, and its page."""

import dataclasses

import numpy as np
import pytest

from research.proposition_one import CAPS, CASES, MARK, PAGE, constant, follow, holds, table

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(("name", "rate", "smoothness"), [("ideal", 1, 1), ("large L", 0.4, 4)])
def test_the_descent_of_a_parabola_in_closed_form(name, rate, smoothness):
    """theta shrinks by 1 - eta L per step, so |theta|^2 falls by (2 eta / L - eta^2) |grad|^2."""
    case = dataclasses.replace(BY_NAME[name], rate=rate, smoothness=smoothness, mu=0.7)
    eta = rate / (2 * smoothness)
    path = follow(case, 0.01, steps=20)
    assert path.changes == pytest.approx(-(2 * eta / smoothness - eta**2) * path.squares)
    assert path.potential[-1] == pytest.approx(1.25 * (1 - eta * smoothness) ** 38)


def test_noise_leaves_the_floor_of_a_stationary_process():
    """x <- a x + eta eps has the variance eta^2 sigma^2 / (1 - a^2)."""
    case = dataclasses.replace(BY_NAME["noise"], mu=0.7)
    tails = [follow(case, 0.01, steps=900, seed=seed).potential[50:].mean() for seed in range(6)]
    assert np.mean(tails) == pytest.approx(0.5**2 * 0.1 / (1 - 0.5**2), rel=0.05)


def test_the_claim_holds_in_the_ideal_case_only():
    bounded = {c.name for c in CASES if holds([constant(c, cap) for cap in CAPS])}
    assert bounded == {"ideal"}


def test_the_repaired_bound_holds_for_all_convex_cases_and_only_for_them():
    for case in CASES:
        path = follow(case, 0.01, steps=400)
        assert bool(np.all(path.changes <= path.repaired + 1e-12)) == (not case.wave), case.name


def test_a_first_power_of_the_cap_remains_where_mu_star_is_not_alpha():
    """Twice the cap, twice the largest rise."""
    case = BY_NAME["other optimum"]
    rises = [follow(case, cap, steps=1000).changes[100:].max() for cap in (0.001, 0.0005)]
    assert rises[0] == pytest.approx(2 * rises[1], rel=0.05)


def test_the_page_has_the_table():
    assert PAGE.read_text().partition(MARK)[2].strip() == table().strip()
