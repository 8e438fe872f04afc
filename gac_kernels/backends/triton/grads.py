"""Gradient of the logits from the gradients of log-probabilities and entropies.

Notation: N = B T rows, V vocabulary size, L lanes, R consecutive logits per lane.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .softmax import NO_LOSS, row_at, write_gradient, write_zeros

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["T"],
    do_not_specialize_on_alignment=["targets", "lse", "entropy", "d_logps", "d_entropy"],
)
def grads_kernel(
    logits,  # [B, T, V]
    out,  # [B, T, V]
    targets,  # int64 [N]
    lse,  # float32 [N]
    entropy,  # float32 [N]
    d_logps,  # float32 [N]
    d_entropy,  # float32 [N]
    T,
    V,
    stride_b: tl.int64,
    stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    exp2_scale,
    softcap,  # or None
    inverse_temperature,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    d_logp = tl.load(d_logps + n)
    d_h = tl.load(d_entropy + n)
    out_row = row_at(out, n, T, out_stride_b, out_stride_t)
    if (y != NO_LOSS) & ((d_logp != 0) | (d_h != 0)):
        row = row_at(logits, n, T, stride_b, stride_t)
        nats = tl.load(lse + n)
        log2_lse = nats * LOG2E
        rounding = tl.fma(nats, LOG2E, -log2_lse)  # rounding error of the product
        write_gradient(
            row,
            out_row,
            None,
            y,
            V,
            log2_lse,
            rounding,
            exp2_scale,
            softcap,
            d_logp * inverse_temperature,
            d_h * inverse_temperature,
            tl.load(entropy + n),
            True,
            BLOCK,
            STAGES,
        )
    else:
        write_zeros(out_row, V, BLOCK)


def grads_launch(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor,
    temperature: float,
    out: Tensor,
    softcap: float | None = None,
) -> launch.Launch:
    """The launch of `grads_kernel`, which writes the gradient of the logits to `out` [B, T, V]."""
    tile = launch.tiling(logits.shape[-1], logits.dtype)
    arguments = {
        "logits": logits,
        "out": out,
        **launch.dense(
            targets=targets, lse=lse, entropy=entropy, d_logps=d_logps, d_entropy=d_entropy
        ),
        **launch.geometry(logits, out),
        "exp2_scale": launch.exp2_scale(temperature),
        "softcap": softcap,
        "inverse_temperature": 1 / temperature,
        "BLOCK": tile.lanes * tile.width,
        "STAGES": tile.stages,
    }
    return launch.Launch(grads_kernel, targets.numel(), arguments, tile.warps)


def row_grads(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor,
    temperature: float,
    out: Tensor,
    softcap: float | None = None,
) -> None:
    columns = targets, lse, entropy, d_logps, d_entropy
    grads_launch(logits, *columns, temperature, out, softcap).run(logits.device)
