"""Row kernels in Triton: for CUDA GPUs, and for a CPU under Triton's interpreter.

One file per operation: the kernel, its launch and the backend function (see
`gac_kernels.backends`).
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import torch

from ... import tokens as by_torch
from ...contract import LossOutput, LossSpec
from ...tokens import DTYPES, BatchInputs, Tokens, TokenTerms

_INSTALLED = importlib.util.find_spec("triton") is not None
if _INSTALLED:
    from triton.runtime.interpreter import InterpretedFunction

    from .grads import row_grads, scale_
    from .loss import loss_kernel, row_loss
    from .plan import plan_by_kernels
    from .reduce import reduce_by_kernels
    from .stats import row_stats

    __all__ = ["plan", "reduce", "row_grads", "row_loss", "row_stats", "scale_", "unavailable"]


def plan(inputs: BatchInputs, spec: LossSpec, dtype: torch.dtype = torch.float32) -> Tokens:
    # on a CPU there are no launches to save, and an interpreted kernel takes milliseconds
    return (by_torch.plan if inputs.targets.is_cpu else plan_by_kernels)(inputs, spec, dtype)


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> LossOutput:
    return (by_torch.reduce if terms.loss.is_cpu else reduce_by_kernels)(tokens, terms, moments)


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on `device`; None if they can."""
    if not _INSTALLED:
        return "the package triton is not installed"
    if dtype not in DTYPES:
        return f"its kernels take float32, bfloat16 and float16, not {dtype}"
    if isinstance(loss_kernel, InterpretedFunction):
        return _interpreter_error()
    if device.type != "cuda":
        return f"it does not run on {device.type!r}; on a CPU, set TRITON_INTERPRET=1 before import"
    # AMD GPUs number capabilities differently; Triton compiles for every AMD GPU that it supports
    if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has a compute capability below 8.0"
    return None


def _interpreter_error() -> str | None:
    """Why the interpreter does not work, or None.

    In loops, Triton 3.6's interpreter converts one-element arrays to scalars, which numpy 2.4
    rejects.
    """
    triton, numpy = (tuple(map(int, version(p).split(".")[:2])) for p in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return "the interpreter of Triton 3.6 needs numpy < 2.4"
    return None
