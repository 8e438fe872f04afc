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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .contract import IGNORE
from .linear import Gradients, Head, capturing, sort_tokens, unsorted
from .loss import Result, cast, differentiate, refuse_double_backward, without_autocast
from .reference import scale_logits, select_outputs
from .tokens import NeedsGrad, Operands, part, power_above

# entries of the comparison of a row's candidates with each other, [M, K, K], computed at once
COMPARED = 1 << 22


class Candidates(NamedTuple):
    """Candidate tokens of rows of logits."""

    ids: Tensor  # int64 [M, K]; IGNORE: not a candidate
    logps: Tensor  # float32 or better [M, K]: 0 where there is no candidate, nan outside [0, V)
    derivative: Tensor  # [M, K]: of the scaled logit with respect to the logit

    @property
    def valid(self) -> Tensor:
        """Which entries are candidates: bool [M, K]."""
        return self.ids != IGNORE


def candidates(
    logits: Tensor,  # [M, V]
    ids: Tensor,  # int64 [M, K]
    lse: Tensor,  # [M]: logsumexp of the scaled logits
    temperature: float | Tensor,  # or [M]
    softcap: float | None,
) -> Candidates:
    """Look up the candidates' log-probabilities; call before the logits are overwritten."""
    x = logits.gather(1, _inside(ids, logits.shape[1])).to(lse.dtype)
    z = scale_logits(x, temperature, softcap)
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
    out: Tensor,  # [M, V]: the gradient of the rest, with `upstream.sum(1)` as that of a log-prob
    rows: Candidates,
    upstream: Tensor,  # [M, K]: derivatives of the loss in the candidates' log-probabilities
    entropy: Tensor,  # [M]
    d_entropy: Tensor,  # [M]
) -> None:
    """Overwrite the gradient of the candidates' logits.

    Values are computed in float32 and rounded once: in bfloat16, a sum with what `out` has there
    would cancel where the model is sure of its token.
    """
    p = torch.where(rows.valid, rows.logps.exp(), 0)
    own, shared = _summed_over_equal_ids(rows.ids, upstream), upstream.sum(1, keepdim=True)
    value = own - shared * p
    # a masked entry (-inf) adds 0 log 0 = 0 to the entropy
    log_p = torch.where(p == 0, 0, rows.logps)
    value = (value - d_entropy[:, None] * p * (log_p + entropy[:, None])) * rows.derivative
    inside = (rows.ids >= 0) & (rows.ids < out.shape[1])
    # entries that are no candidates repeat one that is
    first = inside.to(torch.int8).argmax(1, keepdim=True)
    ids = torch.where(inside, rows.ids, _inside(rows.ids.gather(1, first), out.shape[1]))
    value = torch.where(inside, value, value.gather(1, first)).to(out.dtype)
    value = torch.where(inside.any(1, keepdim=True), value, out.gather(1, ids))
    out.scatter_(1, ids, value)


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


def block_candidates(
    op: Operands, logits: Tensor, ids: Tensor, lse: Tensor, temperature: float | Tensor
) -> Candidates:
    """`candidates` of a block [1, M, V] of logits; all ranks of a sharded vocabulary take part."""
    lookup = getattr(op.backend, "candidates", candidates)
    return lookup(logits[0], ids, lse, temperature, op.softcap)


def block_gradient(
    op: Operands,
    logits: Tensor,  # [1, M, V]
    out: Tensor,  # [1, M, V], may be the logits
    rows: Candidates,
    stats: tuple[Tensor, Tensor],  # lse and entropy, [M] each
    upstream: Tensor,  # [M, K]
    d_entropy: Tensor,  # [M]
    temperature: float | Tensor,
) -> None:
    """Write the gradient of a block's logits, given those of its candidates' log-probs."""
    lse, entropy = stats
    upstream = torch.where(rows.valid, upstream, 0)
    op.backend.row_grads(
        logits,
        torch.where(rows.ids[:, 0] == IGNORE, IGNORE, -1),  # the candidates are written below
        lse,
        entropy,
        upstream.sum(1),
        d_entropy,
        temperature,
        out,
        op.softcap,
        whole_row=False,
    )
    write = getattr(op.backend, "write_candidates", write_gradient)
    write(out[0], rows, upstream, entropy, d_entropy)


def candidate_stats(
    op: Operands,
    ids: Tensor,  # int64 [N, K]
    more_outputs: bool = False,
) -> tuple[Tensor, ...]:
    """Compute logps [N, K], and entropy, lse and MORE_OUTPUTS (of the first candidate), [N] each.

    Takes 2 N H V FLOPs.
    """
    head = Head(op, NeedsGrad(False, False, False), ids[:, 0] != IGNORE)
    order, counts = sort_tokens(head.live, None)
    scaling, ordered = op.scaling(order), ids[order]
    width = ids.shape[1]
    results = head.zeros(width + (5 if more_outputs else 2))
    for block in head.blocks(order, counts):
        temperature, own = part(scaling, block.tokens), ordered[block.tokens]
        _, entropy, lse, *extra = op.backend.row_stats(
            block.logits, own[:, 0], temperature, op.softcap, more_outputs
        )
        rows = block_candidates(op, block.logits, own, lse, temperature)
        results[:width, block.tokens] = rows.logps.T
        torch.stack([entropy, lse, *extra], out=results[width:, block.tokens])
    logps, others = unsorted(results, order).split([width, len(results) - width])
    return logps.T, *others.unbind()


def candidate_grads(
    op: Operands,
    ids: Tensor,  # int64 [N, K]
    stats: tuple[Tensor, Tensor],  # lse and entropy, [N] each
    upstream: tuple[Tensor, Tensor],  # of the log-probs [N, K] and of the entropies [N]
    needs: NeedsGrad,
) -> Gradients:
    """Compute the gradients of the operands from recomputed logits: 6 N H V FLOPs."""
    live, (d_logps, d_entropy) = ids[:, 0] != IGNORE, upstream
    used = live & ((torch.where(ids == IGNORE, 0, d_logps) != 0).any(1) | (d_entropy != 0))
    head = Head(op, needs, live)
    order, counts = sort_tokens(used, used)
    scaling, ordered = op.scaling(order), ids[order]
    columns = [x[order] for x in (*stats, d_logps, d_entropy)]
    for block in head.blocks(order, counts):
        temperature = part(scaling, block.tokens)
        lse, entropy, d_logp, d_ent = (x[block.tokens] for x in columns)
        rows = block_candidates(op, block.logits, ordered[block.tokens], lse, temperature)
        assert block.out is not None
        block_gradient(
            op, block.logits, block.out, rows, (lse, entropy), d_logp, d_ent, temperature
        )
    return head.gradients()


def candidate_loss(
    op: Operands,
    ids: Tensor,  # int64 [N, K]
    function: Callable[..., Tensor],  # (logps [M, K], entropy [M], *inputs, *outputs) -> [M]
    inputs: Sequence[Tensor],  # [N, ...] each
    outputs: Sequence[str],  # of MORE_OUTPUTS
    needs: NeedsGrad,
) -> Result:
    """Compute a loss of each token's K log-probs and its entropy, and the gradients: 6 N H V FLOPs.

    Outputs: the sum of the losses, the losses [N], logps [N, K], entropy and the requested outputs,
    [N] each, and no report of a filter.
    """
    live, more_outputs, width = ids[:, 0] != IGNORE, len(outputs) > 0, ids.shape[1]
    head = Head(op, needs, live)
    half = op.dtype == torch.float16  # the scale of its gradients follows the largest derivative
    inv_scale = op.rows.new_full((), 2.0**-100, dtype=torch.float32) if half else None
    order, counts = sort_tokens(live, live if any(needs) else None)
    scaling, ordered, inputs = op.scaling(order), ids[order], [x[order] for x in inputs]
    results = head.zeros(width + (5 if more_outputs else 2))  # logps, losses, entropy, more
    nonzero = torch.zeros_like(live)
    for block in head.blocks(order, counts, nonzero):
        span, temperature = block.tokens, part(scaling, block.tokens)
        _, entropy, lse, *extra = op.backend.row_stats(
            block.logits, ordered[span, 0], temperature, op.softcap, more_outputs
        )
        rows = block_candidates(op, block.logits, ordered[span], lse, temperature)
        columns = *(x[span] for x in inputs), *select_outputs(extra, outputs)
        losses, upstream = differentiate(
            function, rows.logps, entropy, columns, block.out is not None
        )
        results[:width, span] = rows.logps.T
        torch.stack([losses, entropy, *extra], out=results[width:, span])
        if upstream is None or block.out is None:
            continue
        d_logps, d_entropy = torch.where(rows.valid, upstream[0], 0), upstream[1]
        nonzero[span] = (d_logps != 0).any(1) | (d_entropy != 0)
        if inv_scale is not None:
            size = torch.cat([d_logps, d_logps.sum(1, keepdim=True), d_entropy[:, None]], 1).abs()
            size = size / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
            largest, fits = power_above(size).maximum(inv_scale), size.max() <= 64 * inv_scale
            larger = torch.where(fits, inv_scale, largest)  # no logit's gradient overflows
            if capturing(live.device) or larger != inv_scale:  # the host waits here
                head.rescale(inv_scale / larger, block.before)
            inv_scale, d_logps, d_entropy = larger, d_logps / larger, d_entropy / larger
        block_gradient(
            op, block.logits, block.out, rows, (lse, entropy), d_logps, d_entropy, temperature
        )
    logps, others = unsorted(results, order).split([width, len(results) - width])
    losses, entropy, *extra = torch.where(live, others, 0)
    total = losses.sum(dtype=torch.float64).to(losses.dtype)
    values = total, losses, logps.T, entropy, *select_outputs(extra, outputs), None
    return values, head.gradients(), inv_scale


class CandidateLogprobs(Function):
    """Log-probs [N, K] of `Operands`, entropy [N], and MORE_OUTPUTS if `more_outputs`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        op: Operands,
        ids: Tensor,
        more_outputs: bool,
    ) -> tuple[Tensor, ...]:
        with without_autocast(op):
            logps, entropy, lse, *extra = candidate_stats(op, ids, more_outputs)
        ctx.save_for_backward(*op[:5], ids, lse, entropy)
        ctx.settings = op[5:]
        # no views of one tensor, and none that is saved: users may modify them
        extra = [x.clone() for x in extra]
        ctx.mark_non_differentiable(*extra)
        return logps.contiguous(), entropy.clone(), *extra

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor, d_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward(torch.is_grad_enabled())
        *operands, ids, lse, entropy = ctx.saved_tensors
        op = Operands(*operands, *ctx.settings)
        needs = NeedsGrad(*ctx.needs_input_grad[:3])
        with without_autocast(op):
            grads = candidate_grads(op, ids, (lse, entropy), (d_logps, d_entropy), needs)
        dtypes = [None if x is None else x.dtype for x in op[:3]]
        return (*cast(grads, dtypes), None, None, None)
