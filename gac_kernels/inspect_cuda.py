"""The CUDA part of `gac_kernels.inspect`: compiles the CUDA kernels with nvcc."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from . import build_cuda
from .backends import cuda
from .inspect_sass import Passes, passes

VOCAB = 152064
_TYPES = {"f": torch.float32, "13__nv_bfloat16": torch.bfloat16, "6__half": torch.float16}
_PTXAS = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '\w+'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class Compiled(NamedTuple):
    """One kernel on one architecture: spills and stack in bytes per thread, `shared` per block."""

    kernel: str
    dtypes: tuple[torch.dtype, ...]
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    sass: str
    passes: Passes
    """Instructions per logit."""
    seconds: float


def compile_kernels(arch: int) -> Iterator[Compiled]:
    """Compile every kernel for one architecture.

    `Compiled.shared` is for a launch on VOCAB logits. Raises RuntimeError if nvcc is missing or
    fails.
    """
    suffix = "90a" if arch == 90 else str(arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        start = time.perf_counter()
        log = build_cuda.compile_source(
            f"-gencode=arch=compute_{suffix},code=sm_{suffix}",
            "-cubin",
            "-Xptxas",
            "-v",
            "-o",
            str(cubin),
        )
        seconds = time.perf_counter() - start
        sass = _functions(cubin)
    matches = list(_PTXAS.finditer(log))
    for match in matches:
        name, dtypes = _signature(match["symbol"])
        text = sass[match["symbol"]]
        slots = cuda.split(VOCAB, dtypes[0], keep_row=True).slots
        yield Compiled(
            name,
            dtypes,
            int(match["registers"]),
            int(match["stores"]),
            int(match["loads"]),
            int(match["stack"]),
            cuda.shared_bytes(slots),
            text,
            passes(text),
            seconds / len(matches),
        )


def title(kernel: Compiled) -> str:
    """Name and dtypes of a kernel, such as "row_kernel float32 to bfloat16"."""
    return f"{kernel.kernel} {' to '.join(str(t).removeprefix('torch.') for t in kernel.dtypes)}"


def _signature(symbol: str) -> tuple[str, tuple[torch.dtype, ...]]:
    """Kernel name and dtypes from a mangled name.

    For example from `_ZN...10row_kernelIf13__nv_bfloat16EEvT_...`.
    """
    match = re.search(r"\d(row_kernel|sketch_kernel)I(\w+?)EE?v", symbol)
    if match is None:
        raise RuntimeError(f"unknown kernel in the output of nvcc: {symbol}")
    dtypes: list[torch.dtype] = []
    for letters in re.findall(r"13__nv_bfloat16|6__half|f|S\d*_", match[2]):
        dtypes.append(_TYPES.get(letters) or dtypes[0])  # S_ repeats the first type
    return match[1], tuple(dtypes)


def _functions(cubin: Path) -> dict[str, str]:
    """The disassembly of each function, by its mangled name."""
    import triton

    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    parts = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
