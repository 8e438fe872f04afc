"""Stateless gradient solvers, in closed form for two objectives.

Each docstring says what the function returns for a zero gradient. Weights use each method's
published scale (sums for PCGrad, means for the others).
"""

from __future__ import annotations

import math

from gac.control.checks import is_real, require

from .gram import Cross, Gram, Weights

OPPOSITE = 1e-7  # 1 + cosine below this is float32 rounding error
PARALLEL = 1e-12  # 1 - cosine^2 below this: the Gram matrix has rank 1


def mgda(gram: Gram) -> Weights | None:
    """The shortest convex combination of the two gradients (arXiv 1810.04650).

    Frank-Wolfe finds it in one step for two objectives. A zero gradient gets all the weight:
    the point is Pareto-stationary. Equal gradients: (0.5, 0.5).
    """
    if not gram.usable:
        return None
    a, b, c = gram.unit()
    gap = a + c - 2 * b
    w = _clip01((c - b) / gap) if gap > 0 else 0.5
    return w, 1 - w


def pcgrad(gram: Gram, threshold: float = 0.0) -> Weights | None:
    """Project each of two conflicting gradients onto the other's normal plane (arXiv 2001.06782).

    threshold: the cosine below which gradients conflict, in [-1, 1]; 0 is the published method.
    Returns (1, 1) for a zero gradient or without conflict.
    """
    ok = is_real(threshold) and -1 <= threshold <= 1
    require(ok, "threshold", threshold, "a cosine in [-1, 1]")
    if not gram.usable:
        return None
    if gram.cosine >= threshold or gram.sft == 0 or gram.rl == 0:
        return 1.0, 1.0
    ratio = math.sqrt(gram.rl) / math.sqrt(gram.sft)
    return 1 - gram.cosine * ratio, 1 - gram.cosine / ratio


def cagrad(gram: Gram, radius: float = 0.5, rescale: int = 0) -> Weights | None:
    """CAGrad (arXiv 2110.14048): the best worst-case descent near the mean gradient g_0.

    radius: the paper's c, >= 0; before rescaling, the update is within radius |g_0| of g_0.
    rescale: 0 none, 1 divides by 1 + radius^2, 2 by 1 + radius.

    Minimizes g_w . g_0 + radius |g_0| |g_w| over g_w = x g_s + (1 - x) g_r. If g_w vanishes (one
    gradient is zero, or opposite gradients cancel within the radius), no direction descends on
    both. Returns the mean (0.5, 0.5) if one gradient is zero, else (0, 0).
    """
    require(is_real(radius) and radius >= 0, "radius", radius, "a finite number >= 0")
    require(rescale in (0, 1, 2), "rescale", rescale, "0, 1 or 2")
    if not gram.usable:
        return None
    a, b, c = gram.unit()
    scale = (1.0, 1 + radius**2, 1 + radius)[rescale]
    reach = radius * 0.5 * math.sqrt(max(a + 2 * b + c, 0.0))  # radius |g_0|
    gap = a + c - 2 * b
    if reach == 0 or a == 0 or c == 0 or gap <= 0:
        pull = radius if gap <= 0 and a > 0 else 0.0  # equal gradients: every g_w is the same
        return (0.5 + 0.5 * pull) / scale, (0.5 + 0.5 * pull) / scale
    slope = 0.5 * (a - c) / (reach * math.sqrt(gap))
    if abs(slope) >= 1:
        x = float(slope < 0)
    else:
        height = math.sqrt(max(a * c - b * b, 0.0) / (1 - slope**2))
        x = _clip01((c - b - slope * height) / gap)
    norm = gram.unit().norm_of((x, 1 - x))
    if norm <= OPPOSITE * reach:
        return 0.0, 0.0
    pull = reach / norm
    return (0.5 + pull * x) / scale, (0.5 + pull * (1 - x)) / scale


def nash_mtl(gram: Gram, max_norm: float | None = 1.0) -> Weights | None:
    """The Nash bargaining solution, G w = 1 / w (arXiv 2202.01017): w_i = 1 / (|g_i| sqrt(1+cos)).

    max_norm: clip the norm of the update to this value, as published; None: no clipping. The
        unclipped update always has norm sqrt(2), so the published update is the unit bisector.
        Opposite gradients have no solution; the weights stay bounded and the update goes to zero. A
        zero gradient gets weight 0, and the other gradient is normalized.
    """
    require(max_norm is None or max_norm > 0, "max_norm", max_norm, "a number > 0, or None")
    if not gram.usable:
        return None
    if gram.sft == 0 and gram.rl == 0:
        return 0.5, 0.5
    spread = math.sqrt(max(1 + gram.cosine, OPPOSITE))
    s, r = (1 / (math.sqrt(x) * spread) if x > 0 else 0.0 for x in (gram.sft, gram.rl))
    norm = gram.norm_of((s, r))
    scale = 1.0 if max_norm is None else min(1.0, max_norm / norm) if norm > 0 else 1.0
    return s * scale, r * scale


def aligned_mtl(
    gram: Gram, mode: str = "min", preference: tuple[float, float] = (0.5, 0.5)
) -> Weights | None:
    """Make the gradients orthogonal and equal in norm, and take a weighted sum (arXiv 2305.19000).

    w = sqrt(scale) G^(-1/2) preference, where scale is the smallest eigenvalue of G ("min") or
    their mean ("rmse"). With parallel gradients or one zero gradient, only the component along
    their common direction remains; two zero gradients return the preference. Weights may be
    negative.
    """
    require(mode in ("min", "rmse"), "mode", mode, "one of min, rmse")
    p, q = _preference(preference)
    if not gram.usable:
        return None
    a, b, c = gram.unit()
    trace = a + c
    if trace == 0:
        return p, q
    det = a * c * (1 - gram.cosine**2)
    if det <= PARALLEL * a * c:  # G = trace v v^T: a single nonzero eigenvalue, so both modes agree
        v_s, v_r = math.sqrt(a / trace), math.copysign(math.sqrt(c / trace), b)
        along = v_s * p + v_r * q
        return v_s * along, v_r * along
    root = math.sqrt(det)
    largest = 0.5 * (trace + math.hypot(a - c, 2 * b))
    scale = math.sqrt((det / largest if mode == "min" else trace / 2) / (trace + 2 * root)) / root
    return scale * ((c + root) * p - b * q), scale * ((a + root) * q - b * p)


def sdmgrad(
    products: Gram | Cross,
    regularization: float = 0.3,
    preference: tuple[float, float] = (0.5, 0.5),
) -> Weights | None:
    """MGDA regularized towards a preference (arXiv 2305.18409), with its inner loop solved exactly.

    products: a `Gram` (one batch), or the 2 x 2 matrix of `cross_gram` (two batches: unbiased).
    regularization: lambda >= 0; 0 on one batch is MGDA.

    The inner loop looks for w = (x, 1 - x) at which the two components of A (w + lambda p) are
    equal, a linear equation in x. A noisy A may have no stable interior solution; the result is
    then the end point that (0.5, 0.5) moves towards.
    """
    ok = is_real(regularization) and regularization >= 0
    require(ok, "regularization", regularization, "a finite number >= 0")
    p, q = (regularization * part for part in _preference(preference))
    if isinstance(products, Gram):
        if not products.usable:
            return None
        a, b, c = products.unit()
        products = ((a, b), (b, c))
    (a_ss, a_sr), (a_rs, a_rr) = products
    if not all(map(math.isfinite, (a_ss, a_sr, a_rs, a_rr))):
        return None
    rise_s, rise_r = a_ss - a_rs, a_sr - a_rr
    at_zero, slope = rise_s * p + rise_r * (1 + q), rise_s - rise_r
    if slope > 0:
        x = _clip01(-at_zero / slope)
    else:
        push = at_zero + 0.5 * slope
        x = 0.5 if push == 0 else float(push < 0)
    total = 1 + p + q
    return (x + p) / total, (1 - x + q) / total


def _clip01(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _preference(preference: tuple[float, float]) -> tuple[float, float]:
    ok = len(preference) == 2 and all(is_real(part) and part >= 0 for part in preference)
    require(ok, "preference", preference, "two finite numbers >= 0")
    return preference
