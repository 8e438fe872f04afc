"""Log-probabilities of K candidate tokens per row, and the gradient of any function of them.

A function of the log-probabilities l_1 .. l_K of K tokens of one row, with derivatives f_k, has the
gradient

    dz_j = sum_k f_k [j = k] - p_j sum_k f_k

in the row's scaled logits z: a multiple of the softmax p, which the backends' row kernels write,
and a correction of K entries, which is written here. So K targets cost as much as one.
Notation: M rows, V vocabulary size, K candidates of a row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import IGNORE
from .reference import TwoCalls, scale_logits
from .tokens import Operands, Scaling, Upstream

# entries of the comparison of a row's candidates with each other, [M, K, K], computed at once
COMPARED = 1 << 22


class Candidates(NamedTuple):
    """Candidate tokens of rows of logits."""

    ids: Tensor  # int64 [M, K]; IGNORE: not a candidate
    logps: Tensor  # float32 or better [M, K]: 0 where there is no candidate, nan outside [0, V)
    derivative: Tensor  # [M, K]: of the scaled logit with respect to the logit


def candidates(
    logits: Tensor,  # [M, V]
    ids: Tensor,  # int64 [M, K]
    lse: Tensor,  # [M]: logsumexp of the scaled logits
    scaling: Scaling,
) -> Candidates:
    """Look up the candidates' log-probabilities; call before the logits are overwritten."""
    x = logits.gather(1, _inside(ids, logits.shape[1])).to(lse.dtype)
    z = scale_logits(x, scaling)
    temperature, softcap = scaling
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    derivative = torch.ones_like(z) / temperature
    if softcap is not None:
        share = z * temperature / softcap  # infinite logits are not capped
        derivative = torch.where(z.isinf(), 0, (1 - share * share) / temperature)
    outside = (ids < 0) | (ids >= logits.shape[1])
    logps = torch.where(outside, math.nan, z - lse[:, None])
    return Candidates(ids, torch.where(ids == IGNORE, 0, logps), derivative)


def write_gradient(
    out: Tensor,  # [M, V]: the gradient of the rest
    rows: Candidates,
    upstream: Upstream,  # with `d_logps` [M, K]
    shared: Tensor,  # [M, K] or [M, 1]: the derivative that the softmax is multiplied by
) -> None:
    """Overwrite the gradient of the candidates' logits.

    Values are computed in float32 and rounded once: in bfloat16, a sum with what `out` has there
    would cancel where the model is sure of its token.
    """
    _, entropy, d_logps, d_entropy = upstream
    p = torch.where(rows.ids == IGNORE, 0, rows.logps.exp())
    own = _summed_over_equal_ids(rows.ids, d_logps)
    # own - shared p, without cancellation where p is near 1
    value = (own - shared) * p - own * rows.logps.expm1()
    # a masked entry (-inf) adds 0 log 0 = 0 to the entropy
    log_p = torch.where(p == 0, 0, rows.logps)
    value = (value - d_entropy[:, None] * p * (log_p + entropy[:, None])) * rows.derivative
    inside = (rows.ids >= 0) & (rows.ids < out.shape[1])
    first = inside.to(torch.int8).argmax(1, keepdim=True)
    index, found = distinct(rows.ids, out.shape[1])
    value = torch.where(inside, value, value.gather(1, first)).to(out.dtype)
    out.scatter_(1, index, torch.where(found, value, out.gather(1, index)))


def distinct(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Where to write one value for each candidate, int64 [M, K], and which rows have any, [M, 1].

    Entries that are no candidates repeat the first that is, so that no other value is written.
    """
    inside = (ids >= 0) & (ids < vocabulary)
    first = inside.to(torch.int8).argmax(1, keepdim=True)
    index = torch.where(inside, ids, _inside(ids.gather(1, first), vocabulary))
    return index, inside.any(1, keepdim=True)


def _inside(ids: Tensor, vocabulary: int) -> Tensor:
    """Ids that can be read: those outside [0, V) become 0."""
    return torch.where((ids >= 0) & (ids < vocabulary), ids, 0)


def _summed_over_equal_ids(ids: Tensor, values: Tensor) -> Tensor:
    """The sum of `values` [M, K] over the entries of a row that have the same id, at each of them.

    Summed in a fixed order, unlike an atomic addition to the row.
    """
    count, size = ids.shape
    if size == 1:
        return values
    sums = torch.empty_like(values)
    step = max(COMPARED // size**2, 1)
    for start in range(0, count, step):
        part = slice(start, start + step)
        equal = ids[part, :, None] == ids[part, None, :]
        sums[part] = (equal * values[part, None, :]).sum(-1)
    return sums


def with_candidates(op: Operands) -> Operands:
    """The operands with a backend for K targets per row, if they have those."""
    return op if op.targets.dim() == 1 else replace(op, backend=CandidateRows(op.backend))


class CandidateRows(TwoCalls):
    """Backend (see `backends`) for K targets per row: its targets and log-probs are [M, K]."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        # a backend whose rows are shards of a vocabulary has its own
        self.candidates = getattr(inner, "candidates", candidates)

    def row_stats(
        self,
        logits: Tensor,  # [1, M, V]
        targets: Tensor,
        scaling: Scaling,
        *,
        more_outputs: bool = False,
    ) -> tuple[Tensor, ...]:
        """The further outputs are those of the first candidate."""
        _, entropy, lse, *extra = self.inner.row_stats(
            logits, targets[:, 0], scaling, more_outputs=more_outputs
        )
        return self.candidates(logits[0], targets, lse, scaling).logps, entropy, lse, *extra

    def row_grads(
        self,
        logits: Tensor,  # [1, M, V]
        targets: Tensor,
        scaling: Scaling,
        upstream: Upstream,
        out: Tensor,  # [1, M, V], may be the logits
    ) -> None:
        rows = self.candidates(logits[0], targets, upstream.lse, scaling)
        # the gradient of the rest; the candidates are no targets, because they are written below
        rest = torch.where(targets[:, 0] == IGNORE, IGNORE, -1)
        total = upstream._replace(d_logps=upstream.d_logps.sum(1))
        self.inner.row_grads(logits, rest, scaling, total, out, whole_row=False)
        write_gradient(out[0], rows, upstream, total.d_logps[:, None])
