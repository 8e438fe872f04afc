"""Signals from the norm of the accumulated gradient after each micro-batch.

Let f and h be the fractions of the demonstrations and rollouts accumulated so far, and w_s and w_r
the weights of the two terms. For independent rows,

    E|sum|^2 = w_s^2 (f^2 |g_s|^2 + f sigma_s^2) + w_r^2 (h^2 |g_r|^2 + h sigma_r^2)
               + 2 w_s w_r f h <g_s, g_r>

which is linear in the five unknowns, so least squares is unbiased if the points (f, h) identify
them. At least five points are needed. Strict alternation never identifies them, because f - h then
takes only two values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gac_kernels.contract import Signals

from .alignment import Alignment
from .evidence import Evidence, Norms, Reading, State, Wanted

UNKNOWNS = 5
_ROUNDING = 1e-8  # tolerance for rounding in the diagonal of the projection


@dataclass(frozen=True)
class AccumulatorSignals:
    """Estimates the quantities in equation 3 for all parameters, without a second gradient buffer.

    The squared error of the inner product is estimated as half the squared change since the last
    refresh. It includes the error of one measurement and the drift of the true value.
    """

    wanted = Wanted(norms=True)

    def init(self) -> State:
        """State with no previous inner product."""
        return {"inner": None}

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """Reads `evidence.norms`."""
        if evidence.norms is None:
            raise ValueError("evidence.norms=None: record the norms of the accumulated gradient")
        sft, sft_variance, rl, rl_variance, inner = solve(evidence.norms)
        last = state["inner"]
        error = math.nan if last is None else (inner - last) ** 2 / 2
        signals = Signals(sft_variance, rl_variance, sft + rl - 2 * inner)
        known = {"inner": inner if math.isfinite(inner) else last}
        totals = sft + sft_variance, rl + rl_variance
        return Reading(signals, alignment=Alignment(inner, error, sft, rl, *totals)), known


def order(demos: int, rollouts: int) -> list[bool]:
    """Order of the micro-batches, True for demonstrations: a quarter of the more frequent kind, all
    of the other kind, then the rest. The error is close to the minimum over orders with few
    switches.
    """
    kind = demos >= rollouts
    many, few = max(demos, rollouts), min(demos, rollouts)
    first = max(many // 4, 1)
    return [kind] * first + [not kind] * few + [kind] * (many - first)


def design(progress: Tensor) -> Tensor:
    """[M, 5] design matrix: coefficients of |g_s|^2, sigma_s^2, |g_r|^2, sigma_r^2 and <g_s, g_r>,
    without the term weights.
    """
    f, h = progress.double().unbind(1)
    return torch.stack([f * f, f, h * h, h, 2 * f * h], 1)


def tells_all(progress: Tensor) -> bool:
    """Whether norms at these points determine all five unknowns."""
    return int(torch.linalg.matrix_rank(design(progress))) == UNKNOWNS


def solve(norms: Norms) -> list[float]:
    """|g_s|^2, sigma_s^2, |g_r|^2, sigma_r^2, <g_s, g_r>; nan for those that the norms do not
    determine.
    """
    known = design(norms.progress)
    inverse = torch.linalg.pinv(known)
    found = inverse @ norms.squares.double()
    s, r = norms.weights
    weights = found.new_tensor([s * s, s * s, r * r, r * r, s * r])
    told = ((inverse @ known).diagonal() > 1 - _ROUNDING) & (weights != 0)
    return torch.where(told, found / weights, math.nan).tolist()
