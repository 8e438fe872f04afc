"""The mixing weight that minimizes the mean squared error: equations 3 to 5 of the paper.

The SFT and RL gradients are g_s = g_s* + b_s + noise and g_r = g_r* + b_r + noise. Each function
here minimizes over mu the expected squared distance between mu g_s + (1 - mu) g_r and the target
alpha g_s* + (1 - alpha) g_r*.
"""

from __future__ import annotations

import math

from gac.errors import finite, require
from gac.types import Corrections


def mu_star(
    alpha: float,
    disagreement: float,
    sft_variance: float,
    rl_variance: float,
    covariance: float = 0.0,
) -> float:
    """Equations 3 and 4: (alpha D + sigma_r^2 - c) / (D + sigma_s^2 + sigma_r^2 - 2 c), in [0, 1].

    Args:
        alpha: target share of the SFT gradient, in [0, 1].
        disagreement: `D = |g_s* - g_r*|^2` >= 0, in the same unit as the two variances.
        sft_variance: sigma_s^2 >= 0, total variance of the SFT gradient.
        rl_variance: sigma_r^2 >= 0, total variance of the RL gradient.
        covariance: c, trace of the cross-covariance of the two gradients. True moments satisfy 2 c
            <= sigma_s^2 + sigma_r^2; with noisy estimates the denominator may be <= 0, and the
            quotient is then clipped, as in the paper.

    Returns:
        mu*, in [0, 1]; alpha if numerator and denominator are both zero.

    Raises:
        ValueError: an argument is not finite, a variance is negative, or alpha is outside [0, 1].

    Source:
        The paper's Theorem 1 and its extension to correlated noise.
    """
    plain = Corrections(covariance=covariance)
    return mu_star_biased(
        alpha,
        disagreement=disagreement,
        sft_variance=sft_variance,
        rl_variance=rl_variance,
        corrections=plain,
    )


def mu_star_biased(
    alpha: float,
    disagreement: float,
    sft_variance: float,
    rl_variance: float,
    corrections: Corrections,
) -> float:
    """The exact optimum for biased gradients, clipped to [0, 1].

    Without biases it reduces to equations 3 and 4::

        <d + Delta, alpha d - b_r> + sigma_r^2 - c
        ------------------------------------------
        |d + Delta|^2 + sigma_s^2 + sigma_r^2 - 2 c

    Equation 5 is the special case in which d is orthogonal to both biases and the paper's g-bar is
    b_r. Errors are those of `mu_star`.

    Args:
        alpha: target share of the SFT gradient, in [0, 1].
        disagreement: `|d|^2` >= 0, with `d = g_s* - g_r*`.
        sft_variance: sigma_s^2 >= 0.
        rl_variance: sigma_r^2 >= 0.
        corrections: covariance and bias terms.

    Returns:
        mu*, in [0, 1].

    Source:
        Our derivation, in docs/controller.md.
    """
    alpha, d, ss, rr = _checked(alpha, disagreement, sft_variance, rl_variance)
    cov, gap, gap_d, rl_d, rl_gap = map(finite, Corrections._fields, corrections)
    d, ss, rr, cov, gap, gap_d, rl_d, rl_gap = _scaled(d, ss, rr, cov, gap, gap_d, rl_d, rl_gap)
    numerator = alpha * d + alpha * gap_d - rl_d - rl_gap + rr - cov
    return _quotient(numerator, d + 2 * gap_d + gap + ss + rr - 2 * cov, alpha)


def mu_star_biased_paper(
    alpha: float,
    disagreement: float,
    sft_variance: float,
    rl_variance: float,
    covariance: float = 0.0,
    *,
    bias_dot_gradient: float,
    bias_gap_sq: float,
) -> float:
    """Equation 5 as printed, clipped to [0, 1]; the first five arguments are those of `mu_star`.

    Args:
        bias_dot_gradient: `<b_r - b_s, g-bar>`; the paper does not define g-bar. In its appendix:
            `gamma |g-bar|^2`.
        bias_gap_sq: `|b_r - b_s|^2` >= 0.
    """
    alpha, d, ss, rr = _checked(alpha, disagreement, sft_variance, rl_variance)
    cov = finite("covariance", covariance)
    dot = finite("bias_dot_gradient", bias_dot_gradient)
    gap = _variance("bias_gap_sq", bias_gap_sq)
    d, ss, rr, cov, dot, gap = _scaled(d, ss, rr, cov, dot, gap)
    return _quotient(alpha * d + rr - cov + dot, d + ss + rr - 2 * cov + gap, alpha)


def _checked(
    alpha: float, disagreement: float, sft_variance: float, rl_variance: float
) -> tuple[float, float, float, float]:
    alpha = finite("alpha", alpha)
    require(0 <= alpha <= 1, "alpha", alpha, "a number in [0, 1]")
    return (
        alpha,
        _variance("disagreement", disagreement),
        _variance("sft_variance", sft_variance),
        _variance("rl_variance", rl_variance),
    )


def _variance(name: str, value: float) -> float:
    number = finite(name, value)
    require(number >= 0, name, value, "a number >= 0, because it is a squared norm")
    return number


def _scaled(*terms: float) -> list[float]:
    """Scale all terms by the same power of two, without rounding, so that no sum overflows."""
    exponent = math.frexp(max(map(abs, terms)))[1]
    return [math.ldexp(term, -exponent) for term in terms]


def _quotient(numerator: float, denominator: float, alpha: float) -> float:
    if denominator == 0:
        return alpha if numerator == 0 else float(numerator > 0)
    return min(max(numerator / denominator, 0.0), 1.0)
