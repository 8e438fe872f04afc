"""Gradient of the logits from those of log-probabilities and entropies; scaling of gradients.

Notation: N = B T rows, V vocabulary size, L lanes, R consecutive logits per lane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tokens import Scaling, Upstream
from . import launch
from .softmax import NO_LOSS, row_at, row_scaling, write_gradient, write_zeros

_COLUMNS = ("targets", *Upstream._fields)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["N", "T"],
    do_not_specialize_on_alignment=[*_COLUMNS, "temperatures"],
)
def grads_kernel(
    logits,  # [B, T, V]
    out,  # [B, T, V]
    targets,  # int64 [N]
    lse,  # float32 [N]
    entropy,  # float32 [N]
    d_logps,  # float32 [N]
    d_entropy,  # float32 [N]
    N,
    T,
    V,
    stride_b: tl.int64,
    stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    temperatures,  # float32 [N], or None: those of the next two arguments
    exp2_scale,
    inverse_temperature,
    softcap,  # or None
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
        exp2_scale, inverse_temperature = row_scaling(
            temperatures, n, exp2_scale, inverse_temperature
        )
        nats = tl.load(lse + n)
        log2_lse = nats * LOG2E
        rounding = tl.fma(nats, LOG2E, -log2_lse)  # rounding error of the product
        write_gradient(
            row=row,
            out=out_row,
            y=y,
            V=V,
            top=log2_lse,
            log2_mass=rounding,
            exp2_scale=exp2_scale,
            softcap=softcap,
            d_logp=d_logp * inverse_temperature,
            d_entropy=d_h * inverse_temperature,
            entropy=tl.load(entropy + n),
            HAS_ENTROPY=True,
            BLOCK=BLOCK,
            STAGES=STAGES,
        )
    else:
        write_zeros(out_row, V, BLOCK)


def row_grads(
    logits: Tensor,
    targets: Tensor,
    scaling: Scaling,
    upstream: Upstream,
    out: Tensor,
    *,
    whole_row: bool = True,
) -> None:
    tile = launch.tiling(logits, out)
    arguments = {
        "logits": logits,
        "out": out,
        **launch.dense(targets=targets, **upstream._asdict()),
        "N": targets.numel(),
        **launch.geometry(logits, out),
        **launch.scaling(scaling),
        "BLOCK": tile.lanes * tile.width,
        "STAGES": tile.stages,
    }
    launch.Launch(grads_kernel, targets.numel(), arguments, tile.warps).run(logits.device)


@triton.jit(do_not_specialize=["rows", "T", "V"], do_not_specialize_on_alignment=["factor"])
def scale_kernel(
    tensor,  # [B, T, V]
    factor,  # 0-d
    rows,
    T,
    V: tl.int64,
    stride_b: tl.int64,
    stride_t: tl.int64,
    BLOCK: tl.constexpr,
):
    """tensor *= factor, with a fixed number of programs; all return immediately if factor is 1."""
    multiplier = tl.load(factor).to(tl.float32)
    if multiplier != 1:
        per_row = tl.cdiv(V, BLOCK)
        for tile in range(tl.program_id(0).to(tl.int64), rows * per_row, tl.num_programs(0)):
            row = row_at(tensor, tile // per_row, T, stride_b, stride_t)
            start = (tile % per_row) * BLOCK
            offsets = start + tl.arange(0, BLOCK)
            if start + BLOCK <= V:  # only a row's last tile needs a mask
                x = tl.load(row + offsets)
                tl.store(row + offsets, (x.to(tl.float32) * multiplier).to(x.dtype))
            else:
                x = tl.load(row + offsets, mask=offsets < V)
                tl.store(
                    row + offsets, (x.to(tl.float32) * multiplier).to(x.dtype), mask=offsets < V
                )


def scale_(tensor: Tensor, factor: Tensor) -> None:
    flat = tensor.is_contiguous()
    if not flat and (tensor.dim() != 3 or tensor.stride(-1) != 1):
        tensor.mul_(factor)
        return
    rows = tensor.view(1, 1, -1) if flat else tensor
    geometry = launch.geometry(rows)
    if flat:
        geometry["stride_t"] = 0  # a single row: keep its length out of the specialization
    arguments = {
        "tensor": rows,
        "factor": factor,
        "rows": rows.shape[0] * rows.shape[1],
        **geometry,
        "BLOCK": 4096,
    }
    programs = 4
    if tensor.is_cuda:
        properties = torch.cuda.get_device_properties(tensor.device)
        programs = 8 * properties.multi_processor_count
    programs = programs if tensor.numel() else 0
    launch.Launch(scale_kernel, programs, arguments, 8).run(tensor.device)
