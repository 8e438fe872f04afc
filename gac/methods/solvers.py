"""Gradient solvers: two gradients per step, weights from their inner products.

A solver needs only three scalars, so sharded gradients cost one small all-reduce. The update is w_s
g_s + w_r g_r; the weights may be negative or sum to more than 1, so they apply to gradients, not to
losses. Each solver uses its publication's scale (sums for PCGrad, means for the others).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch

from gac.errors import is_count, is_real, require
from gac.fields import NonNegative, Positive, PositiveShare, Valid, number, one_of
from gac.types import Mix, Observation, State, StepNeeds, Weights

from .base import TokenWeighted

Cross = tuple[tuple[float, float], tuple[float, float]]  # A_ij = <g_i of one batch, g_j of another>


class Gram(NamedTuple):
    """Inner products of the SFT gradient g_s and the RL gradient g_r."""

    sft: float
    """<g_s, g_s>"""
    dot: float
    """<g_s, g_r>"""
    rl: float
    """<g_r, g_r>"""

    @classmethod
    def of_means(cls, gram: torch.Tensor, sft_count: int) -> Gram:
        """Build from the inner products of the gradients of equal-sized micro-batches.

        gram: [M_s + M_r, M_s + M_r], SFT first; its blocks are averaged.
        """
        inside = is_count(sft_count, 1) and sft_count < gram.shape[0]
        require(inside, "sft_count", sft_count, f"an integer in [1, {gram.shape[0] - 1}]")
        s, r = slice(None, sft_count), slice(sft_count, None)
        blocks = [gram[s, s], gram[s, r], gram[r, r]]
        ss, sr, rr = torch.stack([block.double().mean() for block in blocks]).tolist()
        return cls(max(ss, 0.0), sr, max(rr, 0.0))  # rounding may leave a mean just below zero

    @property
    def cosine(self) -> float:
        """Cosine of the two gradients in [-1, 1]; 0 if one of them is zero."""
        norms = math.sqrt(self.sft) * math.sqrt(self.rl)
        return min(max(self.dot / norms, -1.0), 1.0) if norms > 0 else 0.0

    def unit(self) -> Gram:
        """Divide by the larger squared norm to avoid overflow; zeros are returned unchanged."""
        size = max(self.sft, self.rl)
        return self if size == 0 else Gram(self.sft / size, self.dot / size, self.rl / size)

    def norm_of(self, weights: Weights) -> float:
        """Norm of the update, |w_s g_s + w_r g_r|."""
        s, r = weights
        return math.sqrt(max(s * s * self.sft + 2 * s * r * self.dot + r * r * self.rl, 0.0))


def cross_gram(gram: torch.Tensor, sft_count: int) -> Cross:
    """SDMGrad's 2 x 2 matrix of inner products of the two terms' gradients.

    Entry (i, j) is the inner product of term i's gradient over the first half of its micro-batches
    with term j's gradient over the second half of its micro-batches.

    gram: [M_s + M_r, M_s + M_r] inner products, SFT first, equal sizes, at least two of each.
    """
    total = gram.shape[0]
    enough = is_count(sft_count, 2) and total - sft_count >= 2
    use = f"at least 2 of each term; there are {total} micro-batches in total"
    require(enough, "sft_count", sft_count, use)
    cuts = [0, sft_count // 2, sft_count, (sft_count + total) // 2, total]
    parts = [slice(*pair) for pair in itertools.pairwise(cuts)]
    first, second = (parts[0], parts[2]), (parts[1], parts[3])
    a, b, c, d = (gram[i, j].double().mean().item() for i in first for j in second)
    return (a, b), (c, d)


Preference = Annotated[
    tuple[float, float],
    Valid(
        "two finite numbers >= 0", lambda x: len(x) == 2 and all(is_real(y) and y >= 0 for y in x)
    ),
]


@dataclass(frozen=True)
class GramSolver(TokenWeighted, family="gradient solver", cost="second gradient buffer"):
    """Weights the two gradients by a function of their inner products."""

    unit_rl: bool = False
    """Divide the RL gradient by its norm first, as the paper's baselines do."""

    def init(self) -> State:
        return {"skipped": 0, "cosine": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.5)  # only logged for a skipped step; otherwise `solve` replaces it

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=1)

    def weights(self, state: State, gram: Gram) -> tuple[State, Weights | None]:
        """Return the new state and the weights; None skips the step. `gram` is finite."""
        return state, self.closed_form(gram)

    def closed_form(self, gram: Gram) -> Weights | None:
        """The weights of a stateless solver; None skips the step. `gram` is finite."""
        raise NotImplementedError

    def solve(self, state: State, gram: torch.Tensor, mix: Mix) -> tuple[State, Weights | None]:
        pair, after, weights = Gram.of_means(gram, len(gram) // 2), state, None
        if not all(map(math.isfinite, pair)):
            return {**state, "skipped": state["skipped"] + 1}, None
        norm = math.sqrt(pair.rl) if self.unit_rl else 0.0
        if norm > 0:  # weights for an RL gradient of norm 1, applied to the raw one
            after, weights = self.weights(state, Gram(pair.sft, pair.dot / norm, 1.0))
            weights = weights and (weights[0], weights[1] / norm)
        else:
            after, weights = self.weights(state, pair)
        skipped = after["skipped"] + (weights is None)
        return {**after, "skipped": skipped, "cosine": pair.cosine}, weights

    def report(self, state: State) -> dict[str, float | None]:
        return {"cosine": state["cosine"], "solver_skipped": state["skipped"]}


@dataclass(frozen=True)
class MGDA(GramSolver, name="mgda", source="arXiv 1810.04650"):
    """The shortest convex combination of the two gradients, which descends on both terms.

    Frank-Wolfe finds it in one step for two objectives, so the paper's number of iterations has no
    effect. A zero gradient gets all the weight: the point is Pareto-stationary.
    """

    def closed_form(self, gram: Gram) -> Weights:
        a, b, c = gram.unit()
        gap = a + c - 2 * b
        w = min(max((c - b) / gap, 0.0), 1.0) if gap > 0 else 0.5
        return w, 1 - w


@dataclass(frozen=True)
class PCGrad(GramSolver, name="pcgrad", source="arXiv 2001.06782"):
    """Sum of the gradients; if they conflict, each first loses its component along the other."""

    threshold: Annotated[float, number("a cosine in [-1, 1]", lambda x: -1 <= x <= 1)] = 0.0
    """The cosine below which gradients conflict, in [-1, 1]; the paper tries -0.2, 0 and 0.2."""

    def closed_form(self, gram: Gram) -> Weights:
        if gram.cosine >= self.threshold or gram.sft == 0 or gram.rl == 0:
            return 1.0, 1.0
        ratio = math.sqrt(gram.rl) / math.sqrt(gram.sft)
        return 1 - gram.cosine * ratio, 1 - gram.cosine / ratio


CANCELLED = 1e-7  # relative norm below which gradients cancel, in float32


@dataclass(frozen=True)
class CAGrad(GramSolver, name="cagrad", source="arXiv 2110.14048"):
    """The direction with the best worst-case descent within a ball around the mean gradient.

    Minimizes g_w . g_0 + radius |g_0| |g_w| over g_w = x g_s + (1 - x) g_r, with the mean gradient
    g_0. If g_w vanishes (one gradient is zero, or opposite gradients cancel within the radius), no
    direction descends on both; the weights are then (0.5, 0.5) if one gradient is zero, else 0.
    """

    radius: NonNegative = 0.5
    """Radius of the ball in units of the mean gradient's norm, >= 0: the publication's c."""
    rescale: Annotated[int, one_of(0, 1, 2)] = 0
    """0: none; 1: divide by 1 + radius^2; 2: by 1 + radius."""

    def closed_form(self, gram: Gram) -> Weights:
        a, b, c = gram.unit()
        scale = (1.0, 1 + self.radius**2, 1 + self.radius)[self.rescale]
        reach = self.radius * 0.5 * math.sqrt(max(a + 2 * b + c, 0.0))  # radius |g_0|
        gap = a + c - 2 * b
        if reach == 0 or a == 0 or c == 0 or gap <= 0:
            pull = self.radius if gap <= 0 and a > 0 else 0.0  # equal gradients: g_w is constant
            return (0.5 + 0.5 * pull) / scale, (0.5 + 0.5 * pull) / scale
        slope = 0.5 * (a - c) / (reach * math.sqrt(gap))
        if abs(slope) >= 1:
            x = float(slope < 0)
        else:
            height = math.sqrt(max(a * c - b * b, 0.0) / (1 - slope**2))
            x = min(max((c - b - slope * height) / gap, 0.0), 1.0)
        norm = gram.unit().norm_of((x, 1 - x))
        if norm <= CANCELLED * reach:
            return 0.0, 0.0
        pull = reach / norm
        return (0.5 + pull * x) / scale, (0.5 + pull * (1 - x)) / scale


OPPOSITE = 1e-7  # 1 + cosine below this is float32 rounding error


@dataclass(frozen=True)
class NashMTL(GramSolver, name="nash-mtl", source="arXiv 2202.01017"):
    """The Nash bargaining solution: an update along the bisector of the two gradients.

    G w = 1 / w is solved exactly, w_i = 1 / (|g_i| sqrt(1 + cos)), so the paper's number of inner
    steps has no effect. The update has norm sqrt(2) before `max_norm`. Opposite gradients have no
    solution; the weights stay bounded and the update goes to zero. A zero gradient gets weight 0,
    and the other gradient is normalized.
    """

    max_norm: Positive | None = 1.0
    """Largest norm of the update, as published; null: no limit, and the norm is sqrt(2)."""
    scale: Positive = 1.0
    """Scale of the update, the paper's "lr scale"; has almost no effect with AdamW."""

    def closed_form(self, gram: Gram) -> Weights:
        if gram.sft == 0 and gram.rl == 0:
            return 0.5 * self.scale, 0.5 * self.scale
        spread = math.sqrt(max(1 + gram.cosine, OPPOSITE))
        s, r = (1 / (math.sqrt(x) * spread) if x > 0 else 0.0 for x in (gram.sft, gram.rl))
        norm = gram.norm_of((s, r))
        limit = math.inf if self.max_norm is None or norm == 0 else self.max_norm / norm
        factor = min(1.0, limit)
        return self.scale * (s * factor), self.scale * (r * factor)


PARALLEL = 1e-12  # 1 - cosine^2 below this: the Gram matrix has rank 1


@dataclass(frozen=True)
class AlignedMTL(GramSolver, name="aligned-mtl", source="arXiv 2305.19000"):
    """Preference-weighted sum of the gradients after their principal components are equalized.

    w = sqrt(scale) G^(-1/2) preference. With parallel gradients or one zero gradient, only the
    component along their common direction remains; two zero gradients give the preference. Weights
    may be negative, so an update may raise one of the two losses.
    """

    mode: Annotated[str, one_of("min", "rmse")] = "min"
    """Common scale of the components: the smallest eigenvalue of G (min) or their mean (rmse)."""
    preference: Preference = (0.5, 0.5)
    """Shares of SFT and RL, >= 0."""

    def closed_form(self, gram: Gram) -> Weights:
        p, q = self.preference
        a, b, c = gram.unit()
        trace = a + c
        if trace == 0:
            return p, q
        det = a * c * (1 - gram.cosine**2)
        if det <= PARALLEL * a * c:  # G = trace v v^T: one nonzero eigenvalue, so both modes agree
            v_s, v_r = math.sqrt(a / trace), math.copysign(math.sqrt(c / trace), b)
            along = v_s * p + v_r * q
            return v_s * along, v_r * along
        root = math.sqrt(det)
        largest = 0.5 * (trace + math.hypot(a - c, 2 * b))
        common = det / largest if self.mode == "min" else trace / 2
        scale = math.sqrt(common / (trace + 2 * root)) / root
        return scale * ((c + root) * p - b * q), scale * ((a + root) * q - b * p)


@dataclass(frozen=True)
class SDMGrad(
    GramSolver, name="sdmgrad", source="arXiv 2305.18409", cost="three more gradient buffers"
):
    """MGDA whose inner products come from two independent halves of the batch.

    The publication draws three batches per step; here the halves give the weights and their mean
    gives the direction, without an extra backward pass. The inner loop is solved exactly.
    """

    regularization: NonNegative = 0.3
    """Pull towards the preference, >= 0; 0 is MGDA."""
    preference: Preference = (0.5, 0.5)
    """Shares of SFT and RL, >= 0."""

    def __post_init__(self) -> None:
        if self.unit_rl:
            raise ValueError(
                "unit_rl=True is not supported: the RL gradients of the two halves have different "
                "norms; use false"
            )
        super().__post_init__()

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=2)

    def from_halves(self, products: Cross) -> Weights | None:
        """The weights from the inner products of the halves; None if one is not finite.

        The inner loop looks for w = (x, 1 - x) at which the two components of A (w + lambda p) are
        equal, a linear equation in x. A noisy A may have no stable interior solution; the result is
        then the end point that (0.5, 0.5) moves towards.
        """
        (a_ss, a_sr), (a_rs, a_rr) = products
        if not all(map(math.isfinite, (a_ss, a_sr, a_rs, a_rr))):
            return None
        p, q = (self.regularization * part for part in self.preference)
        rise_s, rise_r = a_ss - a_rs, a_sr - a_rr
        at_zero, slope = rise_s * p + rise_r * (1 + q), rise_s - rise_r
        if slope > 0:
            x = min(max(-at_zero / slope, 0.0), 1.0)
        else:
            push = at_zero + 0.5 * slope
            x = 0.5 if push == 0 else float(push < 0)
        total = 1 + p + q
        return (x + p) / total, (1 - x + q) / total

    def solve(self, state: State, gram: torch.Tensor, mix: Mix) -> tuple[State, Weights | None]:
        weights = self.from_halves(cross_gram(gram, 2))
        if weights is None:
            return {**state, "skipped": state["skipped"] + 1}, None
        return {**state, "cosine": Gram.of_means(gram, 2).cosine}, weights


@dataclass(frozen=True)
class MoCo(
    GramSolver,
    name="moco",
    source="Fernando et al., ICLR 2023 (OpenReview dLAYGdKTi2)",
    cost="four extra gradient buffers, two of them kept between steps",
):
    """Each update moves the loss weights by one projected step; they weight average gradients.

    The averages y <- y + rate (g - y) also give the inner products, which are divided by their
    trace, so `lr` is dimensionless.
    """

    rate: PositiveShare = 0.1
    """beta in (0, 1]: y <- y + beta (g - y)."""
    lr: NonNegative = 0.1
    """Step size of the weights, for inner products divided by their trace."""
    decay: NonNegative = 0.5
    """`rate` and `lr` decay as (step + 1)^-decay."""
    regularization: NonNegative = 0.0
    """rho >= 0, added to the diagonal of the Gram matrix."""

    def init(self) -> State:
        return {**super().init(), "weights": [0.5, 0.5], "step": 0}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return super().mix({**state, "step": last.step}, last)

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(parts=1, average=self.rate * (step + 1) ** -self.decay)

    def weights(self, state: State, gram: Gram) -> tuple[State, Weights | None]:
        lr = self.lr * (state["step"] + 1) ** -self.decay
        a, b, c = gram.unit()
        trace, rho = (a + c) or 1.0, self.regularization
        s, r = state["weights"]
        v_s = s - lr * ((a / trace + rho) * s + b / trace * r)
        v_r = r - lr * (b / trace * s + (c / trace + rho) * r)
        share = min(max((v_s - v_r + 1) / 2, 0.0), 1.0)  # projection onto the simplex
        return {**state, "weights": [share, 1 - share]}, (share, 1 - share)
