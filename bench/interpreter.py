"""Triton's interpreter with bfloat16 as on a GPU, and a GPU's half-precision GEMMs.

The interpreter multiplies the bits of bfloat16 numbers as if they were integers, and truncates a
float32 number that it converts to bfloat16.
"""

from typing import Any

import numpy as np
import torch


def _widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 numbers, stored as uint16, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(x: np.ndarray) -> np.ndarray:
    """float32 numbers as bfloat16, rounded to nearest even."""
    rounded = torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy()


def emulate_bfloat16() -> None:
    """Patch the interpreter of this process, which needs Triton."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    create_dot, cast = builder.create_dot, builder.cast_impl

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(_widen(x.data), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        )
        return create_dot(self, a, b, d, *options)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_narrow(src.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_widen(src.data), tl.float32)
        return cast(self, src, dst_type)

    builder.create_dot, builder.cast_impl = dot, cast_impl


def emulate_gpu() -> None:
    """Patch this process so that a CPU runs the epilogue head, interpreted."""
    from gac_kernels import epilogue, projection

    emulate_bfloat16()
    patches = {"operand_dtype": lambda device, dtype: dtype, "multiply": multiply}
    for name, function in patches.items():
        setattr(projection, name, function)
    epilogue.device_error = lambda device: None
    projection.ROW_MULTIPLE["cpu"] = projection.ROW_MULTIPLE["cuda"]


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
    """`projection.multiply` of half-precision operands: float32 sums, rounded once to `out`."""
    product = a.float() @ b.float()
    out.add_(product) if accumulate else out.copy_(product)
