"""Compiler statistics of every shipped kernel; no GPU is needed.

`python -m gac_kernels.inspect` compiles each kernel for sm_80, sm_90 and sm_100 and prints
registers, spills, stack and shared memory. With `--arch gfx942 gfx950`, it compiles the Triton
kernels for AMD GPUs, where registers are VGPRs, spills are counted in registers and shared memory
is LDS.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import build_cuda
from .backends import cuda, triton
from .contract import DemoWeight, LossSpec
from .tokens import BatchInputs, Scaling, TokenTerms, Upstream, plan

ARCHITECTURES = ("80", "90", "100")
VOCAB = 152064  # of a launch of the CUDA kernels, which determines their shared memory
LINE = "{:14} {:48} {:7} {:>9} {:>6} {:>6} {:>7}"


class Report(NamedTuple):
    """Compiler statistics of one kernel in one configuration on one architecture."""

    kernel: str
    config: str
    arch: str
    registers: int
    """Registers per thread."""
    spills: int
    """Bytes stored and loaded by spills, per thread."""
    stack: int
    """Stack size in bytes per thread."""
    shared: int
    """Shared memory in bytes per program."""
    symbol: str
    """The kernel's name in the machine code."""
    code: bytes
    """The machine code: a cubin, or AMD's assembly."""


# Patterns of numbers in the compiler's output, which are added.
NVIDIA = {
    "registers": r"Used (\d+) registers",
    "spills": r"(\d+) bytes spill (?:stores|loads)",
    "stack": r"(\d+) bytes stack frame",
}
AMD = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "spills": r"\.[vs]gpr_spill_count:\s+(\d+)",
    "stack": r"\.private_segment_fixed_size:\s+(\d+)",
}

# A mangled name, such as `_ZN...10row_kernelIf13__nv_bfloat16EEvT_...`, and the types in it.
_SYMBOL = re.compile(r"\drow_kernelI(\w+?)EE?v")
_TYPES = {"f": torch.float32, "13__nv_bfloat16": torch.bfloat16, "6__half": torch.float16}

# A name and a `backends.triton.launch.Launch` to compile.
Configuration = tuple[str, Any]

# Large, medium and small vocabularies cover the tilings; 50257 covers rows that are not aligned.
_ROWS = (
    (151936, torch.bfloat16),
    (151936, torch.float32),
    (32000, torch.float16),
    (50257, torch.bfloat16),
    (2048, torch.float32),
)
# Blocks of a head, whose rows are aligned: V, and the distance of the rows.
_BLOCKS = ((50257, 50304), (100278, 100288))
_EVERYTHING = LossSpec(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01, demo_weight=DemoWeight.SHAPED)
_SPECS = {
    "all options": _EVERYTHING,
    "reinforce, k1, one": LossSpec(
        policy_loss="reinforce", kl_coef=0.1, kl_estimator="k1", demo_weight=DemoWeight.ONE
    ),
    "cispo, k2, p, truncated": LossSpec(
        policy_loss="cispo",
        kl_coef=0.1,
        kl_estimator="k2",
        demo_weight=DemoWeight.P,
        correction="token_truncate",
    ),
    "sapo, kl ratio, trust, masked": LossSpec(
        policy_loss="sapo",
        kl_coef=0.1,
        use_bias_correction_kl=True,
        demo_weight=DemoWeight.TRUST,
        correction="token_mask",
    ),
}


def triton_configurations() -> Iterator[Configuration]:
    """Yield every Triton kernel in every tiling, and the loss kernel for each of `_SPECS`."""
    column, default, logps = torch.empty(8, device="meta"), LossSpec(), torch.empty(2, 4).to("meta")
    roles = logps[:, 0], logps[:, 0] > 0
    inputs = BatchInputs(logps.long(), *roles, 0.5, logps, logps, demo_norm=3)
    full = plan(inputs, default)
    plain, corrected = full._replace(ref=None), full._replace(factor=column, rollout_logps=column)
    stats = plain.targets, Scaling(1.0)
    upstream = Upstream(column, column, column, column)
    capped = plain.targets, Scaling(1.0, softcap=30.0)
    calls: list[tuple[Any, ...]] = []
    for vocab, dtype in reversed(_ROWS):
        x = torch.empty(2, 4, vocab, dtype=dtype, device="meta")
        name = f"V={vocab} {str(dtype).removeprefix('torch.')}"
        calls += [
            (name, triton.row_stats, x, *stats),
            (name, triton.row_grads, x, *stats, upstream, x),
            (name, triton.scale_, x, column[0]),
            (f"{name}, default", triton.row_loss, x, plain, default, x),
        ]
    for vocab, distance in _BLOCKS:
        buffer = torch.empty(2, 4, distance, device="meta")
        block, out = (b[..., :vocab] for b in (buffer, buffer.bfloat16()))
        name = f"V={vocab} in a head, float32 to bfloat16"
        calls += [
            (name, triton.row_stats, block, *stats),
            (name, triton.row_grads, block, *stats, upstream, out),
            (f"{name}, default", triton.row_loss, block, plain, default, out),
        ]
    wide, to_half = x.float(), "V=151936 float32 to bfloat16"  # x: the first of _ROWS
    shaped = LossSpec(demo_weight=DemoWeight.SHAPED, rollout_reduction="constant", max_tokens=9)
    packed = {"targets": plain.targets, "cu_seqlens": plain.offsets.int(), "mu": column[0]}
    calls += [
        ("no gradient, default", triton.row_loss, x, plain, default, None),
        *(
            (f"{name}, {title}", triton.row_loss, x, tokens, spec, x)
            for title, spec in _SPECS.items()
            for tokens in [full if spec.correction == "none" else corrected]
        ),
        (f"{name}, softcap", triton.row_stats, x, *capped),
        (f"{name}, softcap, more", partial(triton.row_stats, more_outputs=True), x, *capped),
        (f"{name}, softcap", triton.row_grads, x, *capped, upstream, x),
        (
            f"{name}, softcap, all options",
            partial(triton.row_loss, softcap=30.0),
            x,
            full,
            _EVERYTHING,
            x,
        ),
        (f"{to_half}, default", triton.row_loss, wide, plain, default, x),
        ("padded", triton.plan, inputs, shaped),
        ("packed, mu a tensor", triton.plan, inputs._replace(**packed), shaped),
        ("no reference", triton.reduce, plain, TokenTerms(*[column] * 5), True),
        (
            "mu a tensor",
            triton.reduce,
            full._replace(mu=column[0]),
            TokenTerms(*[column] * 5),
            True,
        ),
    ]
    for call in calls:
        yield from launches(*call)
    for name, options in _EPILOGUES.items():
        yield from launches(name, _epilogue, **options)


# The epilogue head: the GEMM needs tensor memory accelerators, from sm_90 on.
_EPILOGUES: dict[str, dict[str, bool]] = {
    "gradient": {},
    "forward only": {"gradient": False},
    "bias, softcap, temperatures": {"options": True},
}


def _epilogue(gradient: bool = True, options: bool = False) -> None:
    """Launch the kernels of `backends.triton.exponentials` on the meta device."""
    from .backends.triton.exponentials import exponentials, finish, widen

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, vocab, width = 2816, 152064, 3584
    column, targets = new(rows), new(rows, dtype=torch.int64)
    scaling = Scaling(column if options else 1.0, 30.0 if options else None)
    block = exponentials(
        rows=new(rows, width, dtype=torch.bfloat16),
        weight=new(vocab, width, dtype=torch.bfloat16),
        bias=new(vocab) if options else None,
        targets=targets,
        scaling=scaling,
        values=new(rows, vocab, dtype=torch.bfloat16) if gradient else None,
        tokens=targets,
        factors=column,
    )
    if gradient:
        upstream = Upstream(column, column, column, column)
        widen(block, targets, upstream)  # only with a sharded vocabulary
        finish(block, targets, scaling, upstream)


def needs_hopper(configuration: Configuration) -> bool:
    """Whether a kernel compiles only for compute capability 9.0 and above."""
    return configuration[1].kernel.__name__ == "exponentials_kernel"


def launches(
    name: str, function: Callable[..., object], *arguments: Any, **keywords: Any
) -> Iterator[Configuration]:
    """The launches of a function of the Triton backend, called with tensors on the meta device."""
    triton.launch.recorded.clear()
    function(*arguments, **keywords)
    yield from ((name, launch) for launch in tuple(triton.launch.recorded))


def compile_triton(configuration: Configuration, arch: str) -> Report:
    """Compile one launch as Triton would for 16-byte aligned pointers on a GPU of this `arch`.

    arch: compute capability times 10, such as "90", or the name of an AMD GPU, such as "gfx942".
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    (config, launch), amd = configuration, arch.startswith("gfx")
    # AMD's data-center GPUs, gfx9, have 64 threads per warp
    size = 64 if arch.startswith("gfx9") else 32
    target = GPUTarget("hip", arch, size) if amd else GPUTarget("cuda", int(arch), size)
    device = object()  # a new one, because Triton caches kernels by device
    compiler = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: device,
        get_current_stream=lambda device: None,
    )
    driver.set_active(compiler)
    knobs.compilation.always_compile = True  # a cached kernel leaves no ptxas log
    knobs.nvidia.dump_ptxas_log = True
    warps = triton.launch.launch_warps(launch.warps, target.warp_size)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = launch.kernel.warmup(**launch.arguments, **options, grid=(1,))
    name, shared = compiled.metadata.name, compiled.metadata.shared
    if amd:
        text = compiled.asm["amdgcn"]
        return _report(name, config, arch, text, shared, name, text.encode())
    code = compiled.asm["cubin"]
    return _report(name, config, f"sm_{arch}", log.getvalue(), shared, name, code)


def _report(
    kernel: str, config: str, arch: str, log: str, shared: int, symbol: str, code: bytes
) -> Report:
    numbers = {}
    for name, pattern in (AMD if arch.startswith("gfx") else NVIDIA).items():
        found = re.findall(pattern, log)
        if not found:
            raise RuntimeError(f"no match for {pattern!r} in the compiler log:\n{log}")
        numbers[name] = sum(map(int, found))
    return Report(kernel, config, arch, shared=shared, symbol=symbol, code=code, **numbers)


def compile_cuda(arch: str) -> Iterator[Report]:
    """Compile the kernels of csrc/cuda; thread-block clusters need compute capability 9.0.

    Raises RuntimeError if nvcc is missing or fails.
    """
    suffix = "90a" if arch == "90" else arch
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        target = f"-gencode=arch=compute_{suffix},code=sm_{suffix}"
        log = build_cuda.compile_source(target, "-cubin", "-Xptxas", "-v", "-o", str(cubin))
        code = cubin.read_bytes()
    _, *logs = re.split(r"Compiling entry function '(\w+)'", log)
    for symbol, text in zip(logs[::2], logs[1::2], strict=True):
        match = _SYMBOL.search(symbol)
        if match is None:
            raise RuntimeError(f"unknown kernel in the output of nvcc: {symbol}")
        first, *others = re.findall(r"13__nv_bfloat16|6__half|f|S\d*_", match[1])
        dtypes = [_TYPES.get(x, _TYPES[first]) for x in (first, *others)]  # S_ repeats a type
        config = " to ".join(str(t).removeprefix("torch.") for t in dtypes)
        shared = cuda.shared_bytes(cuda.split(VOCAB, dtypes[0], keep_row=True).slots)
        yield _report("row_kernel", config, f"sm_{arch}", text, shared, symbol, code)


def reports(architectures: list[str]) -> Iterator[Report]:
    """Compile all kernels for each architecture that they support.

    The CUDA kernels are skipped without nvcc.
    """
    clusters = [x for x in architectures if x.isdigit() and int(x) >= 90]
    if clusters and build_cuda.find_nvcc() is None:
        print("nvcc not found: skipping the kernels of csrc/cuda")
        clusters = []
    for arch in clusters:
        yield from compile_cuda(arch)
    for configuration in triton_configurations():
        for arch in architectures:
            if not (needs_hopper(configuration) and (not arch.isdigit() or int(arch) < 90)):
                yield compile_triton(configuration, arch)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gac_kernels.inspect", description=__doc__)
    parser.add_argument(
        "--arch",
        nargs="+",
        default=ARCHITECTURES,
        help="compute capability times 10, or names of AMD GPUs such as gfx942",
    )
    architectures = parser.parse_args(arguments).arch
    for arch in architectures:
        if not re.fullmatch(r"\d{2,3}|gfx\w{3,4}", arch):
            parser.error(f"--arch {arch}: use a number such as 90, or a name such as gfx942")
    interpret = os.environ.get("TRITON_INTERPRET", "0")
    if interpret != "0":
        parser.error(f"TRITON_INTERPRET={interpret}: unset it; an interpreter compiles nothing")
    print(LINE.format(*Report._fields))
    spills = []
    for report in reports(architectures):
        print(LINE.format(*report), flush=True)
        spills.append(report.spills)
    print(f"\n{len(spills)} kernels compiled, {sum(x > 0 for x in spills)} with spills")


if __name__ == "__main__":
    main()
