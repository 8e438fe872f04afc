"""Compiler statistics of every shipped kernel; no GPU is needed.

`python -m gac_kernels.inspect` compiles each kernel for sm_80, sm_90 and sm_100 and prints
registers, spilled bytes, stack, shared memory and instruction counts. With `--arch gfx942 gfx950`,
it compiles the Triton kernels for AMD GPUs, where registers are VGPRs and shared memory is LDS.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .contract import DemoWeight, LossSpec
from .filter import RowMarks
from .inputs import BatchInputs
from .sketch import RowSketch
from .tokens import Tokens, plan

ARCHITECTURES = ("80", "90", "100")
VOCAB = 152064  # of a launch of the CUDA kernels, which determines their shared memory


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
    instructions: int
    wide_accesses: int
    """Number of global loads and stores of 16 bytes per thread."""
    assembly: str
    """The machine code."""


# Patterns of the numbers in the compiler's log, which are added, and of the machine code.
NVIDIA = (
    {
        "registers": r"Used (\d+) registers",
        "spills": r"(\d+) bytes spill (?:stores|loads)",
        "stack": r"(\d+) bytes stack frame",
    },
    {
        "instructions": r"^\s*/\*[0-9a-f]{4,}\*/.*;",
        "wide_accesses": r"(?:LDG|STG)\.E\S*\.128",
    },
)
AMD = (
    {
        "registers": r"\.vgpr_count:\s+(\d+)",
        "spills": r"\.[vs]gpr_spill_count:\s+(\d+)",  # in registers
        "stack": r"\.private_segment_fixed_size:\s+(\d+)",
    },
    {
        "instructions": r"^\s+(?:[sv]|ds|buffer|global|flat)_\w+",
        "wide_accesses": r"\b(?:global|buffer)_(?:load|store)_dwordx4",
    },
)

# A name and a `backends.triton.launch.Launch` to compile.
Configuration = tuple[str, Any]

# Large, medium and small vocabularies cover the tilings; 50257 covers unaligned rows.
_ROWS = (
    (151936, torch.bfloat16),
    (151936, torch.float32),
    (32000, torch.float16),
    (50257, torch.bfloat16),
    (2048, torch.float32),
)
_SPECS = {
    "default": LossSpec(),
    "all options": LossSpec(
        dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01, demo_weight=DemoWeight.SHAPED
    ),
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
    from .backends import triton

    plain, full = meta_tokens(ref=False), meta_tokens(ref=True)
    column = torch.empty(8, device="meta")
    stats, columns = (plain.targets, 1.0), (plain.targets, column, column, column, column, 1.0)
    default, everything = _SPECS["default"], _SPECS["all options"]
    for vocab, dtype in _ROWS:
        logits = torch.empty(2, 4, vocab, dtype=dtype, device="meta")
        name = f"V={vocab} {str(dtype).removeprefix('torch.')}"
        yield from launches(name, triton.row_stats, logits, *stats)
        yield from launches(name, triton.row_grads, logits, *columns, logits)
        yield from launches(name, triton.scale_, logits, column[0])
        yield from launches(f"{name}, default", triton.row_loss, logits, plain, default, logits)
    logits = torch.empty(2, 4, 151936, dtype=torch.bfloat16, device="meta")
    yield from launches("no gradient, default", triton.row_loss, logits, plain, default, None)
    name, softcap = "V=151936 bfloat16", 30.0
    for title, spec in list(_SPECS.items())[1:]:
        tokens = full if spec.kl_coef != 0 else plain
        if spec.correction != "none":
            tokens = tokens._replace(factor=tokens.scale, rollout_logps=tokens.scale)
        yield from launches(f"{name}, {title}", triton.row_loss, logits, tokens, spec, logits)
    name += ", softcap"
    for suffix, more in (("", False), (", more", True)):
        yield from launches(name + suffix, triton.row_stats, logits, *stats, softcap, more)
    yield from launches(name, triton.row_grads, logits, *columns, logits, softcap)
    loss = logits, full, everything, logits, None, softcap
    yield from launches(f"{name}, all options", triton.row_loss, *loss)
    wide = logits.float()
    sketch = RowSketch(wide[0, 0].to(torch.int8), torch.empty(8, 16, device="meta"))
    marks = RowMarks(0.1, wide[0, 0] > 0, torch.empty(2, 8, device="meta"))
    for title, notes in (("", ()), ("sketch, ", (sketch,)), ("filter, ", (None, None, marks))):
        title = f"V=151936 float32 to bfloat16, {title}default"
        yield from launches(title, triton.row_loss, wide, plain, default, logits, *notes)
    spec = LossSpec(demo_weight=DemoWeight.SHAPED, rollout_reduction="constant", max_tokens=9)
    inputs = meta_inputs(ref=True)._replace(demo_norm=3)
    yield from launches("padded", triton.plan, inputs, spec)
    packed = {"targets": plain.targets, "cu_seqlens": plain.offsets.int(), "mu": column[0]}
    yield from launches("packed, mu a tensor", triton.plan, inputs._replace(**packed), spec)


def launches(
    name: str, function: Callable[..., object], *arguments: Any
) -> Iterator[Configuration]:
    """The launches of a function of the Triton backend, called with tensors on the meta device."""
    from .backends.triton.launch import recorded

    recorded.clear()
    function(*arguments)
    yield from ((name, launch) for launch in tuple(recorded))


def meta_inputs(ref: bool) -> BatchInputs:
    """2 x 4 tokens on the meta device, with reference log-probs if `ref`."""
    logps = torch.empty(2, 4, device="meta")
    roles = logps[:, 0], logps[:, 0] > 0
    return BatchInputs(logps.long(), *roles, 0.5, logps, logps if ref else None)


def meta_tokens(ref: bool) -> Tokens:
    return plan(meta_inputs(ref), LossSpec())


def compile_triton(configuration: Configuration, arch: str) -> Report:
    """Compile one launch as Triton would for 16-byte aligned pointers on a GPU of this `arch`.

    arch: compute capability times 10, such as "90", or the name of an AMD GPU, such as "gfx942".
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from .backends.triton.launch import launch_warps

    name, launch = configuration
    amd = arch.startswith("gfx")
    # AMD's data-center GPUs, gfx9, have 64 threads per warp
    target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    target = target if amd else GPUTarget("cuda", int(arch), 32)
    device = object()  # a new one, because Triton caches kernels by device
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: device,
        get_current_stream=lambda device: None,
    )
    triton.runtime.driver.set_active(driver)
    triton.knobs.compilation.always_compile = True  # a cached kernel leaves no ptxas log
    triton.knobs.nvidia.dump_ptxas_log = True
    options = {"num_warps": launch_warps(launch.warps, target.warp_size), "enable_fp_fusion": True}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = launch.kernel.warmup(**launch.arguments, **options, grid=(1,))
    title, shared = (launch.kernel.__name__, name), compiled.metadata.shared
    if amd:
        assembly = compiled.asm["amdgcn"]
        found = _report(*title, arch, assembly, assembly, shared, AMD)
        return found._replace(spills=2 * 4 * found.spills)  # four bytes, stored and loaded
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        sass = _disassemble(file.name)
    return _report(*title, f"sm_{arch}", log.getvalue(), sass, shared)


def _report(
    kernel: str,
    config: str,
    arch: str,
    log: str,
    assembly: str,
    shared: int,
    patterns: tuple[Mapping[str, str], Mapping[str, str]] = NVIDIA,
) -> Report:
    in_log, in_code = patterns
    numbers = {name: len(re.findall(x, assembly, re.MULTILINE)) for name, x in in_code.items()}
    for name, pattern in in_log.items():
        found = re.findall(pattern, log)
        if not found:
            raise RuntimeError(f"no match for {pattern!r} in the compiler log:\n{log}")
        numbers[name] = sum(map(int, found))
    return Report(kernel, config, arch, shared=shared, assembly=assembly, **numbers)


def _disassemble(cubin: str) -> str:
    import triton

    command = [triton.knobs.nvidia.nvdisasm.path, "-c", cubin]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def compile_cuda(arch: str) -> Iterator[Report]:
    """Compile the kernels of csrc/cuda; thread-block clusters need compute capability 9.0.

    Raises RuntimeError if nvcc is missing or fails.
    """
    from . import build_cuda
    from .backends import cuda

    suffix = "90a" if arch == "90" else arch
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernels.cubin"
        target = f"-gencode=arch=compute_{suffix},code=sm_{suffix}"
        log = build_cuda.compile_source(target, "-cubin", "-Xptxas", "-v", "-o", cubin)
        sass = _disassemble(cubin)
    functions = re.split(r"^\.text\.(\w+):$", sass, flags=re.MULTILINE)
    logs = re.split(r"Compiling entry function '(\w+)'", log)
    compiled = dict(zip(logs[1::2], logs[2::2], strict=True))
    for symbol, text in zip(functions[1::2], functions[2::2], strict=True):
        kernel, dtypes = _signature(symbol)
        config = " to ".join(str(t).removeprefix("torch.") for t in dtypes)
        shared = cuda.shared_bytes(cuda.split(VOCAB, dtypes[0], keep_row=True).slots)
        yield _report(kernel, config, f"sm_{arch}", compiled[symbol], text, shared)


_TYPES = {"f": torch.float32, "13__nv_bfloat16": torch.bfloat16, "6__half": torch.float16}


def _signature(symbol: str) -> tuple[str, list[torch.dtype]]:
    """Kernel name and dtypes from a mangled name.

    For example from `_ZN...10row_kernelIf13__nv_bfloat16EEvT_...`.
    """
    match = re.search(r"\d(row_kernel|sketch_kernel)I(\w+?)EE?v", symbol)
    if match is None:
        raise RuntimeError(f"unknown kernel in the output of nvcc: {symbol}")
    dtypes: list[torch.dtype] = []
    for letters in re.findall(r"13__nv_bfloat16|6__half|f|S\d*_", match[2]):
        dtypes.append(_TYPES.get(letters) or dtypes[0])  # S_ repeats the first type
    return match[1], dtypes


def reports(source: str, architectures: list[str]) -> Iterator[Report]:
    """Compile the kernels of a source, "triton" or "cuda", for each architecture that it supports.

    The CUDA kernels are skipped without nvcc.
    """
    from . import build_cuda

    if source == "triton":
        for configuration in triton_configurations():
            for arch in architectures:
                yield compile_triton(configuration, arch)
    elif build_cuda.find_nvcc() is None:
        print("nvcc not found: skipping the kernels of csrc/cuda")
    else:
        for arch in architectures:
            if arch.isdigit() and int(arch) >= 90:
                yield from compile_cuda(arch)


def table(found: list[Report]) -> str:
    """The reports as aligned text, without the machine code."""
    head = [field.replace("_", " ") for field in Report._fields[:-1]]
    rows = [head, *(list(map(str, report[:-1])) for report in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gac_kernels.inspect", description=__doc__)
    parser.add_argument(
        "--arch",
        nargs="+",
        default=ARCHITECTURES,
        help="compute capability times 10, or names of AMD GPUs such as gfx942",
    )
    sources = "cuda", "triton"
    parser.add_argument("--source", nargs="+", choices=sources, default=sources)
    options = parser.parse_args(arguments)
    for arch in options.arch:
        if not re.fullmatch(r"\d{2,3}|gfx\w{3,4}", arch):
            parser.error(f"--arch {arch}: use a number such as 90, or a name such as gfx942")
    interpret = os.environ.get("TRITON_INTERPRET", "0")
    if interpret != "0" and "triton" in options.source:
        parser.error(f"TRITON_INTERPRET={interpret}: unset it; an interpreter compiles nothing")
    found = [report for source in options.source for report in reports(source, options.arch)]
    print(table(found))
    print(f"\n{len(found)} kernels compiled, {sum(x.spills > 0 for x in found)} with spills")


if __name__ == "__main__":
    main()
