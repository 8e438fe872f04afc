"""The half-precision GEMMs of an accelerator on the CPU, which has none into float32."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gac_kernels import projection


class Gemm(NamedTuple):
    """One product: a [M, K] times b [K, N], and what it was written into."""

    shape: tuple[int, int, int]  # M, K, N
    out: torch.dtype
    accumulate: bool


def emulate(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> list[Gemm]:
    """Operands stay in `dtype`; sums are made in float32 and rounded once. Returns the log."""
    log: list[Gemm] = []

    def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        assert a.dtype == b.dtype == dtype and out.shape == (a.shape[0], b.shape[1])
        log.append(Gemm((*a.shape, b.shape[1]), out.dtype, accumulate))
        product = a.float() @ b.float()
        out.add_(product) if accumulate else out.copy_(product)

    monkeypatch.setattr(projection, "operand_dtype", lambda device, compute: compute)
    monkeypatch.setattr(projection, "multiply", multiply)
    return log
