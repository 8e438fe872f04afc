"""Log-probability, entropy and logsumexp of every row, with one program per row.

Notation: N = B T rows, V vocabulary size, L lanes, R consecutive logits per lane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tokens import Scaling
from . import launch
from .softmax import (
    FLOOR,
    LN2,
    NO_LOSS,
    absorb,
    cap,
    gather,
    row_at,
    row_scaling,
    row_values,
    statistics,
    target_logit,
)


@triton.jit
def more_values(row, y, V, exp2_scale, softcap, L: tl.constexpr, R: tl.constexpr):
    """The logp of token y, the entropy, the logsumexp in nats, and contract.MORE_OUTPUTS."""
    x_y = target_logit(row, y, V, softcap)
    top = tl.full([L], float("-inf"), tl.float32)
    mass = tl.zeros([L], tl.float32)
    moment = tl.zeros([L], tl.float32)
    squares = tl.zeros([L], tl.float32)  # of 2^d
    total = tl.zeros([L], tl.float32)
    ahead = tl.zeros([L], tl.int32)  # logits that precede the target's in the order of arg max
    for start in range(0, V, L * R):
        offsets = start + tl.arange(0, L)[:, None] * R + tl.arange(0, R)[None, :]
        inside = offsets < V
        x = cap(tl.load(row + offsets, mask=inside, other=float("-inf")), softcap)
        last = top
        top, mass, moment = absorb(top, mass, moment, x, exp2_scale)
        anchor = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.exp2(tl.maximum(last - anchor, FLOOR))
        p = tl.exp2(tl.fma(x, exp2_scale, -anchor[:, None]))
        squares = squares * decay * decay + tl.sum(p * p, 1)
        total += tl.sum(tl.where(inside, x, 0.0), 1)
        ahead += tl.sum(((x > x_y) | ((x == x_y) & (offsets < y))).to(tl.int32), 1)
    _, square, _ = gather(2 * top, squares, moment)
    top, mass, moment = gather(top, mass, moment)
    logp, entropy, lse, _, log2_mass = statistics(top, mass, moment, x_y, exp2_scale)
    log_square = (tl.log2(square) - 2 * log2_mass) * LN2
    mean = tl.sum(total, 0) * exp2_scale * LN2 / V
    is_top1 = ((tl.sum(ahead, 0) == 0) & (logp == logp)).to(tl.float32)
    return logp, entropy, lse, log_square, mean, is_top1


# Specialize on the alignment of the logits only: the [N] vectors are often slices.
@triton.jit(
    do_not_specialize=["N", "T"],
    do_not_specialize_on_alignment=["targets", "results", "temperatures"],
)
def stats_kernel(
    logits,  # [B, T, V]
    targets,  # int64 [N]
    results,  # float32 [3, N]: logp, entropy, logsumexp; 0 where there is no loss; [6, N] if MORE
    N,
    T,
    V,
    stride_b: tl.int64,
    stride_t: tl.int64,
    temperatures,  # float32 [N], or None: those of the next two arguments
    exp2_scale,
    inverse_temperature,
    softcap,  # or None
    L: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    PEEL: tl.constexpr,
    MORE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    logp = 0.0
    entropy = 0.0
    lse = 0.0
    log_square = 0.0
    mean = 0.0
    is_top1 = 0.0
    if y != NO_LOSS:
        row = row_at(logits, n, T, stride_b, stride_t)
        exp2_scale, _ = row_scaling(temperatures, n, exp2_scale, inverse_temperature)
        if MORE:
            logp, entropy, lse, log_square, mean, is_top1 = more_values(
                row, y, V, exp2_scale, softcap, L, R
            )
        else:
            logp, entropy, lse, _, _ = row_values(
                row, y, V, exp2_scale, softcap, False, PEEL, L, R, STAGES
            )
    tl.store(results + n, logp)
    tl.store(results + N + n, entropy)
    tl.store(results + 2 * N + n, lse)
    if MORE:
        tl.store(results + 3 * N + n, log_square)
        tl.store(results + 4 * N + n, mean)
        tl.store(results + 5 * N + n, is_top1)


def row_stats(
    logits: Tensor,
    targets: Tensor,
    scaling: Scaling,
    *,
    more_outputs: bool = False,
) -> tuple[Tensor, ...]:
    tile, count = launch.tiling(logits), targets.numel()
    results = torch.empty(
        6 if more_outputs else 3, count, dtype=torch.float32, device=logits.device
    )
    arguments = {
        "logits": logits,
        **launch.dense(targets=targets),
        "results": results,
        "N": count,
        **launch.geometry(logits),
        **launch.scaling(scaling),
        "L": tile.lanes,
        "R": tile.width,
        "STAGES": tile.stages,
        "PEEL": launch.peels(logits),
        "MORE": more_outputs,
    }
    launch.Launch(stats_kernel, count, arguments, tile.warps).run(logits.device)
    return results.unbind()
