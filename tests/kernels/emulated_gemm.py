"""Emulates an accelerator's half-precision GEMMs with float32 output, which the CPU lacks."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bench import interpreter
from gac_kernels import projection


class Gemm(NamedTuple):
    """One logged GEMM, a [M, K] @ b [K, N]: shape, output dtype, and whether it accumulated into
    the output.
    """

    shape: tuple[int, int, int]  # M, K, N
    out: torch.dtype
    accumulate: bool


def emulate(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> list[Gemm]:
    """Patch the projection's GEMMs: `dtype` operands, float32 accumulation, one rounding at the
    end. Return the log of calls.
    """
    log: list[Gemm] = []

    def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        assert a.dtype == b.dtype == dtype
        assert out.shape == (a.shape[0], b.shape[1])
        log.append(Gemm((*a.shape, b.shape[1]), out.dtype, accumulate))
        interpreter.multiply(a, b, out, accumulate)

    monkeypatch.setattr(projection, "operand_dtype", lambda device, compute: compute)
    monkeypatch.setattr(projection, "multiply", multiply)
    return log
