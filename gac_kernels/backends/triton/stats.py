"""Log-probability, entropy and logsumexp of every row, with one program per row.

Notation: N = B T rows, V vocabulary size, L lanes, R consecutive logits per lane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from . import launch
from .softmax import NO_LOSS, row_at, row_values


# Specialize on the alignment of the logits only: the [N] vectors are often slices.
@triton.jit(do_not_specialize=["N", "T"], do_not_specialize_on_alignment=["targets", "results"])
def stats_kernel(
    logits,  # [B, T, V]
    targets,  # int64 [N]
    results,  # float32 [3, N]: logp, entropy, logsumexp; 0 where there is no loss
    N,
    T,
    V,
    stride_b: tl.int64,
    stride_t: tl.int64,
    exp2_scale,
    L: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    PEEL: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    logp = 0.0
    entropy = 0.0
    lse = 0.0
    if y != NO_LOSS:
        row = row_at(logits, n, T, stride_b, stride_t)
        logp, entropy, lse, _, _ = row_values(row, y, V, exp2_scale, False, PEEL, L, R, STAGES)
    tl.store(results + n, logp)
    tl.store(results + N + n, entropy)
    tl.store(results + 2 * N + n, lse)


def stats_launch(
    logits: Tensor, targets: Tensor, temperature: float, results: Tensor
) -> launch.Launch:
    """The launch of `stats_kernel`, which writes `results` float32 [3, N]."""
    tile = launch.tiling(logits.shape[-1], logits.dtype)
    arguments = {
        "logits": logits,
        **launch.dense(targets=targets),
        "results": results,
        "N": targets.numel(),
        **launch.geometry(logits),
        "exp2_scale": launch.exp2_scale(temperature),
        "L": tile.lanes,
        "R": tile.width,
        "STAGES": tile.stages,
        "PEEL": launch.unaligned(logits),
    }
    return launch.Launch(stats_kernel, targets.numel(), arguments, tile.warps)


def row_stats(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    softcap: float | None = None,
    more: bool = False,
) -> tuple[Tensor, ...]:
    if more or softcap is not None:
        return reference.row_stats(logits, targets, temperature, softcap, more)
    results = torch.empty(3, targets.numel(), dtype=torch.float32, device=logits.device)
    stats_launch(logits, targets, temperature, results).run(logits.device)
    return results[0], results[1], results[2]
