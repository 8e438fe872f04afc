"""Base class of the gradient solvers: two gradients per step, weights from their inner products.

A solver needs only three scalars, so sharded gradients cost one small all-reduce. The update is w_s
g_s + w_r g_r; the weights may be negative or sum to more than 1, so they apply to gradients, not to
losses. Each solver uses its publication's scale (sums for PCGrad, means for the others).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from gac.control.checks import is_count, is_real, require

from .base import Mix, Observation, State, StepNeeds, TokenWeighted, Weights

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


def check_nonnegative(method: object, *names: str) -> None:
    """Raise ValueError unless the fields are finite numbers >= 0."""
    for name in names:
        value = getattr(method, name)
        require(is_real(value) and value >= 0, name, value, "a finite number >= 0")


def check_preference(preference: tuple[float, float]) -> None:
    """Raise ValueError unless the shares of SFT and RL are valid."""
    ok = len(preference) == 2 and all(is_real(part) and part >= 0 for part in preference)
    require(ok, "preference", preference, "two finite numbers >= 0")


@dataclass(frozen=True)
class GramSolver(TokenWeighted):
    """Weights the two gradients by a function of their inner products."""

    family: ClassVar[str] = "gradient solver"
    cost: ClassVar[str] = "second gradient buffer"

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
