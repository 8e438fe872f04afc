"""Gradient solvers with learned weights, as step functions that take and return a state.

States are named tuples of numbers; `State(*json.loads(json.dumps(state)))` restores one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gac.control.checks import is_real, require

from .gram import Gram, Weights

MIN_WEIGHT = 1e-3  # lower bound of GradNorm's weights: a weight of 0 could never recover


class GradNormState(NamedTuple):
    """State of GradNorm."""

    weights: Weights = (1.0, 1.0)
    """Weights, whose sum is always 2."""
    initial_losses: tuple[float, float] | None = None
    """Losses of the first step; used when `asymmetry` is not 0."""


def gradnorm_step(
    state: GradNormState,
    gram: Gram,
    losses: tuple[float, float] | None = None,
    *,
    asymmetry: float = 0.0,
    lr: float = 0.025,
) -> tuple[Weights | None, GradNormState]:
    """One step of GradNorm (arXiv 1711.02257): move the norms w_i |g_i| towards a common target.

    losses: global means > 0; required if asymmetry != 0.
    asymmetry: the paper's alpha: the target is mean(w |g|) r_i^alpha, with r_i the relative
        inverse training rate L_i / L_i(0) over its mean. 0 equalizes the norms.
    lr: step of a weight, in units of |g_i| / mean(w |g|), which is scale-free. The update uses only
        the sign of the error, so mu jitters by about lr; decay lr over time.

    Returns the weights for this step's gradients and the new state; None and the old state if an
    input is not finite or both gradients are zero. Raises ValueError if a required loss is <= 0.
    """
    require(is_real(lr) and lr >= 0, "lr", lr, "a finite number >= 0")
    require(is_real(asymmetry), "asymmetry", asymmetry, "a finite number")
    rates, initial = (1.0, 1.0), state.initial_losses
    if asymmetry != 0:
        if losses is None:
            raise ValueError("losses=None: needed when asymmetry is not 0")
        if not all(map(math.isfinite, losses)):
            return None, state
        require(min(losses) > 0, "losses", losses, "positive losses (for RL: 1 - mean reward)")
        initial = initial or losses
        s, r = (now / first for now, first in zip(losses, initial, strict=True))
        rates = (2 * s / (s + r)) ** asymmetry, (2 * r / (s + r)) ** asymmetry
    if not gram.usable or gram.sft == gram.rl == 0:
        return None, state
    norms = math.sqrt(gram.sft), math.sqrt(gram.rl)
    weighted = [w * norm for w, norm in zip(state.weights, norms, strict=True)]
    mean = 0.5 * sum(weighted)
    s, r = (
        max(w - lr * _sign(size - mean * rate) * norm / mean, MIN_WEIGHT)
        for w, size, rate, norm in zip(state.weights, weighted, rates, norms, strict=True)
    )
    weights = 2 * s / (s + r), 2 * r / (s + r)
    return weights, GradNormState(weights, initial)


def moco_step(
    weights: Weights, tracked: Gram, *, lr: float = 0.1, regularization: float = 0.0
) -> tuple[Weights | None, Weights]:
    """One projected step of MoCo's weights (Fernando et al., ICLR 2023).

    weights: on the simplex; start with (0.5, 0.5).
    tracked: inner products of the tracked gradients y <- y - beta (y - g), which the caller
        maintains. They are divided by their trace, so lr is dimensionless.
    regularization: rho >= 0, added to the diagonal after the division.

    Returns (new weights, new state), which are equal; (None, old weights) if an input is not
    finite.
    """
    require(is_real(lr) and lr >= 0, "lr", lr, "a finite number >= 0")
    ok = is_real(regularization) and regularization >= 0
    require(ok, "regularization", regularization, "a finite number >= 0")
    if not tracked.usable:
        return None, weights
    a, b, c = tracked.unit()
    trace = (a + c) or 1.0
    s, r = weights
    v_s = s - lr * ((a / trace + regularization) * s + b / trace * r)
    v_r = r - lr * (b / trace * s + (c / trace + regularization) * r)
    share = min(max((v_s - v_r + 1) / 2, 0.0), 1.0)  # projection onto the simplex
    return (share, 1 - share), (share, 1 - share)


def _sign(value: float) -> float:
    return float(value > 0) - float(value < 0)
