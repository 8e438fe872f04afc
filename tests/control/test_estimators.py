"""The optimal mixing weight against an independent computation of the error it minimizes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.control.estimators import mu_star, mu_star_biased, mu_star_biased_paper
from gac.types import Corrections

properties = settings(max_examples=200, deadline=None, derandomize=True)
unit_interval = st.floats(0, 1)
sizes = st.one_of(st.just(0.0), st.floats(1e-12, 1e12), st.floats(0, 1e308))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0.7, 0.0, 0.0, 0.0), 0.7),  # nothing known: alpha
        ((0.7, 0.0, 1.0, 3.0), 0.75),  # no disagreement: inverse-variance weighting
        ((0.7, 2.0, 0.0, 0.0), 0.7),  # no noise: alpha
        ((0.2, 1.0, 0.0, 1.0), 0.6),
        ((0.5, 2.0, 1.0, 1.0, 0.5), 0.5),
        ((0.8, 1.0, 1.0, 2.0, 0.5), 2.3 / 3),
        ((0.5, 0.0, 1.0, 1.0, 1.0), 0.5),  # 0 / 0: both gradients carry the same noise
        ((0.5, 0.0, 1.0, 4.0, 2.5), 1.0),  # a / 0
        ((0.5, 0.0, 4.0, 1.0, 2.5), 0.0),  # -a / 0
        ((0.5, 0.0, 1.0, 2.0, 1.25), 1.0),  # 0.75 / 0.5
        ((0.5, 0.0, 2.0, 1.0, 1.25), 0.0),  # -0.25 / 0.5
        ((0.5, 0.0, 1e308, 1.6e308), 1.6 / 2.6),  # their sum is infinite
        ((0.5, 1e308, 1e308, 0.0), 0.25),
        ((0.5, 0.0, 1.0, 1.0, 3.0), 0.5),  # an impossible covariance: -2 / -4, as printed
    ],
)
def test_mu_star_values(arguments: tuple[float, ...], expected: float) -> None:
    assert mu_star(*arguments) == pytest.approx(expected, abs=1e-15)


def argmin_of_parabola(error) -> float:
    """The minimizer of the parabola through the errors at 0, 1/2 and 1."""
    e0, e1, e2 = error(0.0), error(0.5), error(1.0)
    curvature, slope = 2 * (e2 - 2 * e1 + e0), 4 * e1 - 3 * e0 - e2
    return -slope / (2 * curvature)


@pytest.mark.parametrize("seed", range(20))
def test_biased_optimum_minimizes_the_expanded_error(seed: int) -> None:
    torch.manual_seed(seed)
    g_s, g_r, b_s, b_r = torch.randn(4, 7, dtype=torch.float64)
    alpha, ss, rr = torch.rand(3, dtype=torch.float64).tolist()
    cov = 0.5 * math.sqrt(ss * rr)
    target = alpha * g_s + (1 - alpha) * g_r

    def error(mu: float) -> float:
        bias = mu * (g_s + b_s) + (1 - mu) * (g_r + b_r) - target
        return bias.dot(bias).item() + mu**2 * ss + (1 - mu) ** 2 * rr + 2 * mu * (1 - mu) * cov

    d, gap = g_s - g_r, b_s - b_r
    terms = Corrections(
        cov, gap.dot(gap).item(), gap.dot(d).item(), b_r.dot(d).item(), b_r.dot(gap).item()
    )
    mu = mu_star_biased(alpha, d.dot(d).item(), ss, rr, terms)
    assert mu == pytest.approx(min(max(argmin_of_parabola(error), 0.0), 1.0), abs=1e-10)


def test_unbiased_optimum_is_the_biased_one_without_biases_and_equation_5_by_hand() -> None:
    plain = mu_star(0.3, 1.5, 0.2, 0.7, 0.1)
    assert plain == mu_star_biased(0.3, 1.5, 0.2, 0.7, Corrections(0.1))
    assert plain == mu_star_biased_paper(
        0.3, 1.5, 0.2, 0.7, 0.1, bias_dot_gradient=0.0, bias_gap_sq=0.0
    )
    mu = mu_star_biased_paper(0.25, 2.0, 1.0, 1.0, 0.5, bias_dot_gradient=0.2, bias_gap_sq=0.4)
    assert mu == pytest.approx(1.2 / 3.4, abs=1e-15)


def test_printed_equation_5_is_exact_only_without_overlap_of_bias_and_difference() -> None:
    b_r, gap = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0.0, -0.4, 0.2])
    rl_gap, gap_sq = b_r.dot(gap).item(), gap.dot(gap).item()
    printed = mu_star_biased_paper(
        0.6, 2.0, 0.3, 0.5, bias_dot_gradient=-rl_gap, bias_gap_sq=gap_sq
    )
    orthogonal = Corrections(bias_gap_sq=gap_sq, rl_bias_dot_gap=rl_gap)
    assert mu_star_biased(0.6, 2.0, 0.3, 0.5, orthogonal) == pytest.approx(printed, abs=1e-12)
    assert (
        abs(mu_star_biased(0.6, 2.0, 0.3, 0.5, orthogonal._replace(rl_bias_dot_d=0.5)) - printed)
        > 0.1
    )


@properties
@given(unit_interval, sizes, sizes, sizes)
def test_mu_star_is_a_convex_combination(alpha, d, ss, rr) -> None:
    """A convex combination of alpha (weight D), 0 (sigma_s^2) and 1 (sigma_r^2)."""
    mu = mu_star(alpha, d, ss, rr)
    targets = [x for x, weight in ((alpha, d), (0.0, ss), (1.0, rr)) if weight > 0] or [alpha]
    assert min(targets) - 1e-12 <= mu <= max(targets) + 1e-12


@properties
@given(unit_interval, sizes, sizes, sizes, st.floats(1, 1e6))
def test_mu_star_rises_with_rl_noise_and_falls_with_sft_noise(alpha, d, ss, rr, factor) -> None:
    mu = mu_star(alpha, d, ss, rr)
    more_rl, more_sft = min(rr * factor, 1e308), min(ss * factor, 1e308)
    assert mu_star(alpha, d, ss, more_rl) >= mu - 1e-12
    assert mu_star(alpha, d, more_sft, rr) <= mu + 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.1, 1, 1, 1), "alpha=1.1: use a number in [0, 1]"),
        ((-0.1, 1, 1, 1), "alpha=-0.1: use a number in [0, 1]"),
        ((math.nan, 1, 1, 1), "alpha=nan"),
        ((0.5, -1, 1, 1), "disagreement=-1: use a number >= 0"),
        ((0.5, 1, -1e-9, 1), "sft_variance=-1e-09"),
        ((0.5, 1, 1, math.inf), "rl_variance=inf: use a finite number"),
        ((0.5, 1, 1, 1, math.nan), "covariance=nan"),
        ((0.5, 1, "1", 1), "sft_variance='1'"),
    ],
)
def test_mu_star_errors_name_the_argument(arguments, message: str) -> None:
    with pytest.raises(ValueError) as error:
        mu_star(*arguments)
    assert message in str(error.value)
