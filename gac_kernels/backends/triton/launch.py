"""How the kernels are launched: which tile, how many programs, what each row kernel is told."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 512  # tokens that a program of size N takes at once


class Tiling(NamedTuple):
    """How a program covers its row: tiles of `lanes` x `width` words, `stages` in flight."""

    lanes: int
    width: int
    warps: int
    stages: int


def tiling(vocab: int, dtype: torch.dtype) -> Tiling:
    """The tile for rows of `vocab` words.

    A lane's words fill one 16-byte load and a thread has two lanes: with four, some compilers run
    out of the 64 registers that let two programs of 16 warps share a multiprocessor. The stages of
    large rows hold 80 KiB, so that only two programs fit (on sm_80 and sm_90): enough in flight to
    cover the latency of HBM, and few enough open rows that the gradient's second read finds
    part of its row in the L2 cache. Small rows take fewer warps, or most lanes would idle.
    Rows of odd length start anywhere and are loaded word by word, which takes more registers.
    A table and no autotuning: another tile adds in another order, and tuning runs would
    overwrite logits that share their storage with the gradient.
    """
    width = 16 // dtype.itemsize
    if vocab % 16 and vocab >= 8192:
        return Tiling(256, width, 8, 3)
    if vocab >= 65536:
        return Tiling(1024, width, 16, 6)
    if vocab >= 8192:
        return Tiling(512, width, 8, 4)
    return Tiling(128, width, 4, 3)


class Launch(NamedTuple):
    """A kernel with everything it is launched with."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    warps: int

    def run(self, device: torch.device) -> None:
        """Start it on the current stream of `device`; returns at once."""
        if not self.programs:
            return
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[(self.programs,)](
                **self.arguments, num_warps=self.warps, enable_fp_fusion=True
            )


def geometry(rows: Tensor, out: Tensor | None = None) -> dict[str, int]:
    """Of [B, T, V], and of `out` in the same shape, if it has one.

    Rows at one distance are one batch, whose stride is 0: the compiler makes a kernel for each kind
    of divisibility, and that of T V would change with T. T is at least 1, as kernels divide by it.
    """
    given = (rows,) if out is None else (rows, out)
    batches, length, _ = rows.shape
    even = batches == 1 or all(x.stride(0) == length * x.stride(1) for x in given)
    strides = [(0 if even else x.stride(0), x.stride(1)) for x in given]
    found = {"T": max(batches * length if even else length, 1), "V": rows.shape[2]}
    found |= {"stride_b": strides[0][0], "stride_t": strides[0][1]}
    if out is not None:
        found |= {"out_stride_b": strides[1][0], "out_stride_t": strides[1][1]}
    return found


def dense(**vectors: Tensor | None) -> dict[str, Tensor | None]:
    """The [N] vectors without gaps: a packed batch may come as a strided slice."""
    return {name: None if x is None else x.contiguous() for name, x in vectors.items()}


def bits(temperature: float) -> float:
    """The factor that makes exponents of 2 of logits."""
    return math.log2(math.e) / temperature


def mu_arguments(mu: float | Tensor) -> dict[str, Any]:
    """A tensor stays where it is: no host synchronisation."""
    pointer, number = (mu, 0.0) if isinstance(mu, Tensor) else (None, float(mu))
    return {"mu": pointer, "mu_number": number, "mu_rest": 1 - number}
