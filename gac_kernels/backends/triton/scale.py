"""Scales gradients in place by the upstream gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .softmax import row_at


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
