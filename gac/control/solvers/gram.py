"""The three inner products that every gradient solver needs for two objectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from gac.control.checks import is_count, require

Weights = tuple[float, float]  # (w_s, w_r)
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
        ss, sr, rr = _block_means(gram, sft_count)
        return cls(ss, sr, rr)

    @property
    def usable(self) -> bool:
        """Whether all three products are finite. Raises ValueError on a negative squared norm."""
        require(not self.sft < 0, "gram.sft", self.sft, "a squared norm, >= 0")
        require(not self.rl < 0, "gram.rl", self.rl, "a squared norm, >= 0")
        return all(map(math.isfinite, self))

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


def with_unit_rl(solve: Callable[[Gram], Weights | None], gram: Gram) -> Weights | None:
    """Call `solve` with the RL gradient scaled to norm 1; return weights for the raw gradients.

    The paper's baselines use l2-normalized RL gradients. A zero RL gradient is not scaled.
    """
    norm = math.sqrt(gram.rl) if gram.usable else 0.0
    if norm == 0:
        return solve(gram)
    weights = solve(Gram(gram.sft, gram.dot / norm, 1.0))
    return None if weights is None else (weights[0], weights[1] / norm)


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


def _block_means(gram: torch.Tensor, sft_count: int) -> tuple[float, float, float]:
    inside = is_count(sft_count, 1) and sft_count < gram.shape[0]
    require(inside, "sft_count", sft_count, f"an integer in [1, {gram.shape[0] - 1}]")
    s, r = slice(None, sft_count), slice(sft_count, None)
    blocks = [gram[s, s], gram[s, r], gram[r, r]]
    ss, sr, rr = torch.stack([block.double().mean() for block in blocks]).tolist()
    return max(ss, 0.0), sr, max(rr, 0.0)  # rounding may leave a zero mean just below zero
