"""Gradient solvers that learn their weights: one step each, state in and state out.

States are named tuples of numbers; `State(*json.loads(json.dumps(state)))` restores one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gac.checks import is_real, require

from .gram import Gram, Weights

LEAST = 1e-3  # smallest GradNorm weight: at 0 an objective could not come back


class GradNormState(NamedTuple):
    """What GradNorm remembers."""

    weights: Weights = (1.0, 1.0)
    """Their sum stays 2."""
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
    """One step of GradNorm (arXiv 1711.02257): weighted norms w_i |g_i| move to a common target.

    losses: global means > 0; needed when asymmetry != 0.
    asymmetry: the paper's alpha: the target is mean(w |g|) r_i^alpha, with r_i the relative
        inverse training rate L_i / L_i(0) over its mean. 0 equalises the norms.
    lr: step of a weight, in units of |g_i| / mean(w |g|), which is scale-free. The rule follows
        signs, so mu jitters by about lr: lower it over time.

    Returns the weights for this step's gradients. Not finite, or both gradients zero: None and
    the old state. Raises ValueError on a loss <= 0 that is needed.
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
        max(w - lr * _sign(size - mean * rate) * norm / mean, LEAST)
        for w, size, rate, norm in zip(state.weights, weighted, rates, norms, strict=True)
    )
    weights = 2 * s / (s + r), 2 * r / (s + r)
    return weights, GradNormState(weights, initial)


def moco_step(
    weights: Weights, tracked: Gram, *, lr: float = 0.1, regularization: float = 0.0
) -> tuple[Weights | None, Weights]:
    """One projected step of MoCo's weights (Fernando et al., ICLR 2023).

    weights: on the simplex; start with (0.5, 0.5).
    tracked: inner products of the tracked gradients y <- y - beta (y - g), which the caller keeps.
        It is divided by its trace, so that lr has no unit.
    regularization: rho >= 0, added to the diagonal after that.

    Returns (new weights, new state), the same pair twice; (None, old weights) if not finite.
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
    share = min(max((v_s - v_r + 1) / 2, 0.0), 1.0)  # projection on the simplex
    return (share, 1 - share), (share, 1 - share)


def _sign(value: float) -> float:
    return float(value > 0) - float(value < 0)
