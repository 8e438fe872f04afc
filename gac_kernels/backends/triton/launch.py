"""Launch configuration of the kernels: tile sizes, number of programs, arguments."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...tokens import Scaling

BLOCK = 512  # tokens per iteration of a per-token kernel
LARGE_VOCABULARY = 8192  # from here on, it matters how a row is loaded


class Tiling(NamedTuple):
    """The tiles of a row: `lanes` x `width` logits, `stages` of them in flight."""

    lanes: int
    width: int
    warps: int
    stages: int


def tiling(logits: Tensor, out: Tensor | None = None) -> Tiling:
    """Choose the tile for rows of `logits` [B, T, V] and, if given, of their gradient `out`.

    A lane's logits fill one 16-byte load, and a thread has two lanes: with four, some compiler
    versions exceed the 64 registers at which two programs of 16 warps fit on a multiprocessor. For
    large rows the stages take 80 KiB, so that only two programs fit (on sm_80 and sm_90): enough
    loads in flight to hide the latency of HBM, and few enough active rows that the gradient's
    second read finds part of its row in the L2 cache. Small rows use fewer warps; otherwise most
    lanes would idle. Rows that are not `aligned` are accessed element by element, which takes more
    registers.
    This is a table and not autotuned: a different tile would sum in a different order, and tuning
    runs would overwrite logits that share their storage with the gradient.
    """
    vocab, width = logits.shape[-1], 16 // logits.dtype.itemsize
    if vocab < LARGE_VOCABULARY:
        return Tiling(128, width, 4, 3)
    if not aligned(logits) or (out is not None and not aligned(out)):
        return Tiling(256, width, 8, 3)
    if vocab >= 65536:
        return Tiling(1024, width, 16, 6)
    return Tiling(512, width, 8, 4)


recorded: list[Launch] = []  # the launches on the meta device, for `gac_kernels.inspect`


class Launch(NamedTuple):
    """A kernel and its launch arguments."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    warps: int
    """Number of warps of 32 threads; GPUs whose warps have 64 threads launch half as many."""

    def run(self, device: torch.device) -> None:
        """Launch on the current stream of `device`; asynchronous."""
        if device.type == "meta":
            recorded.append(self)
        if device.type == "meta" or not self.programs:
            return
        warps = launch_warps(self.warps, warp_size(device))
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[(self.programs,)](**self.arguments, num_warps=warps, enable_fp_fusion=True)


def launch_warps(warps: int, size: int) -> int:
    """Number of `size`-thread warps with as many threads as `warps` warps of 32; at least 1."""
    return max(32 * warps // size, 1)


@functools.cache
def warp_size(device: torch.device) -> int:
    """Threads per warp: 32, or 64 on some AMD GPUs."""
    if not torch.version.hip or device.type != "cuda":
        return 32
    return torch.cuda.get_device_properties(device).warp_size


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of programs that run at the same time, one per multiprocessor."""
    if device.type != "cuda":
        return 132 if device.type == "meta" else 4  # of an H100; of the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def aligned(rows: Tensor) -> bool:
    """Whether the compiler knows that all rows of [B, T, V] start at multiples of 16 bytes.

    Triton tells it which strides are multiples of 16 elements. The rows of a head's buffers have
    such a stride, whatever V is; those of a contiguous tensor have stride V.
    """
    strides = rows.stride()[1:2] if len(rows) == 1 else rows.stride()[:2]  # as in `geometry`
    return rows.data_ptr() % 16 == 0 and all(x % 16 == 0 for x in strides)


def peels(logits: Tensor) -> bool:
    """Whether kernels read the first logits of a row separately, up to a multiple of 16 bytes."""
    return logits.shape[-1] >= LARGE_VOCABULARY and not aligned(logits)


def geometry(rows: Tensor, out: Tensor | None = None) -> dict[str, int]:
    """Sizes and strides of `rows` [B, T, V] and, if given, of `out` with the same shape.

    Evenly spaced rows are passed as one batch with stride 0: Triton specializes kernels on the
    divisibility of strides, and the divisibility of the batch stride T V would vary with T. T is at
    least 1 because kernels divide by it.
    """
    tensors = (rows,) if out is None else (rows, out)
    batches, length, _ = rows.shape
    even = batches == 1 or all(x.stride(0) == length * x.stride(1) for x in tensors)
    strides = [(0 if even else x.stride(0), x.stride(1)) for x in tensors]
    arguments = {"T": max(batches * length if even else length, 1), "V": rows.shape[2]}
    arguments |= {"stride_b": strides[0][0], "stride_t": strides[0][1]}
    if out is not None:
        arguments |= {"out_stride_b": strides[1][0], "out_stride_t": strides[1][1]}
    return arguments


def dense(**vectors: Tensor | None) -> dict[str, Tensor | None]:
    """Make the [N] vectors contiguous: a packed batch may be a strided slice."""
    return {name: None if x is None else x.contiguous() for name, x in vectors.items()}


def scaling(of: Scaling) -> dict[str, Any]:
    """Kernel arguments for the temperature of all rows, or of each row, and the softcap.

    exp2_scale, log2(e) / temperature, converts logits to base-2 exponents.
    """
    temperature, softcap = of
    per_row, number = (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)
    return {
        "temperatures": None if per_row is None else per_row.contiguous(),
        "exp2_scale": math.log2(math.e) / number,
        "inverse_temperature": 1 / number,
        "softcap": softcap,
    }


def number(value: float | Tensor | None) -> tuple[Tensor | None, float]:
    """An optional number as two kernel arguments: a tensor or None, and a float."""
    return (value, 0.0) if isinstance(value, Tensor) else (None, float(value or 0))


def mixing(mu: float | Tensor) -> dict[str, Any]:
    """Kernel arguments for mu and 1 - mu."""
    tensor, value = number(mu)
    return {"mu": tensor, "mu_number": value, "one_minus_mu_number": 1 - value}
