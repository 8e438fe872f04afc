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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .contract import DemoWeight, LossSpec
from .inputs import BatchInputs
from .sketch import RowSketch
from .tokens import Tokens, plan

ARCHITECTURES = ("80", "90", "100")
VOCAB = 152064  # of a launch of the CUDA kernels, which determines their shared memory
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/.*;", re.MULTILINE)
WIDE_ACCESS = re.compile(r"(?:LDG|STG)\.E\S*\.128")
AMD_INSTRUCTION = re.compile(r"^\s+(?:[sv]|ds|buffer|global|flat)_\w+", re.MULTILINE)
AMD_WIDE_ACCESS = re.compile(r"\b(?:global|buffer)_(?:load|store)_dwordx4")


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
    exponentials: int
    """Per logit, in each pass over a row: one, or two with a softcap."""
    assembly: str
    """The machine code."""


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
    from .backends.triton.grads import grads_launch
    from .backends.triton.scale import scale_launch
    from .backends.triton.stats import stats_launch

    for vocab, dtype in _ROWS:
        logits = torch.empty(2, 4, vocab, dtype=dtype, device="meta")
        tokens = _meta_tokens(ref=False)
        row = logits.new_empty(8, dtype=torch.float32)
        name = f"V={vocab} {str(dtype).removeprefix('torch.')}"
        yield name, stats_launch(logits, tokens.targets, 1.0, row.expand(3, 8))
        columns = tokens.targets, row, row, row, row
        yield name, grads_launch(logits, *columns, 1.0, logits)
        yield name, scale_launch(logits, row[0], 1)
        yield _loss_configuration(name, "default", logits, logits, tokens)
    logits = torch.empty(2, 4, 151936, dtype=torch.bfloat16, device="meta")
    yield _loss_configuration("no gradient", "default", logits, None, _meta_tokens(ref=False))
    for spec in list(_SPECS)[1:]:
        tokens = _meta_tokens(ref=_SPECS[spec].kl_coef != 0)
        if _SPECS[spec].correction != "none":
            tokens = tokens._replace(factor=tokens.scale, rollout_logps=tokens.scale)
        yield _loss_configuration("V=151936 bfloat16", spec, logits, logits, tokens)
    # with a softcap: the row kernels, and the statistics with and without MORE_OUTPUTS
    targets, row = _meta_tokens(ref=True).targets, logits.new_empty(8, dtype=torch.float32)
    name, softcap = "V=151936 bfloat16, softcap", 30.0
    for suffix, results in (("", row.expand(3, 8)), (", more", row.expand(6, 8))):
        yield name + suffix, stats_launch(logits, targets, 1.0, results, softcap)
    yield name, grads_launch(logits, targets, row, row, row, row, 1.0, logits, softcap)
    tokens = _meta_tokens(ref=True)
    yield _loss_configuration(name, "all options", logits, logits, tokens, softcap=softcap)
    wide = torch.empty(2, 4, 151936, dtype=torch.float32, device="meta")
    yield _loss_configuration(
        "V=151936 float32 to bfloat16", "default", wide, logits, _meta_tokens(ref=False)
    )
    sketch = RowSketch(wide[0, 0].to(torch.int8), torch.empty(8, 16, device="meta"))
    yield _loss_configuration(
        "V=151936 float32 to bfloat16, sketch",
        "default",
        wide,
        logits,
        _meta_tokens(ref=False),
        sketch,
    )


def _loss_configuration(
    name: str,
    spec: str,
    logits: torch.Tensor,
    out: torch.Tensor | None,
    tokens: Tokens,
    sketch: RowSketch | None = None,
    softcap: float | None = None,
) -> Configuration:
    from .backends.triton.loss import loss_launch

    terms = torch.empty(5, 8, device="meta")
    launch = loss_launch(logits, tokens, _SPECS[spec], out, terms, sketch, softcap)
    return f"{name}, {spec}", launch


def _meta_tokens(ref: bool) -> Tokens:
    """2 x 4 tokens on the meta device."""
    targets, is_demo = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([False, True])
    logps = torch.zeros(2, 4)
    inputs = BatchInputs(targets, torch.zeros(2), is_demo, 0.5, logps, logps if ref else None)
    move = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x  # noqa: E731 - one line
    return Tokens(*map(move, plan(inputs, LossSpec())))


def batch_configurations() -> Iterator[Configuration]:
    """The kernels that plan the tokens, with all optional inputs."""
    from .backends.triton.plan import lengths_launch, tokens_launch

    spec = LossSpec(demo_weight=DemoWeight.SHAPED, rollout_reduction="constant", max_tokens=9)
    floats = torch.empty(5, 8, device="meta")
    for mu, cu_seqlens, name in (
        (0.5, None, "padded"),
        (floats[0, 0], torch.empty(3, dtype=torch.int32, device="meta"), "packed, mu a tensor"),
    ):
        tokens = _meta_tokens(ref=True)._replace(mu=mu)
        inputs = BatchInputs(
            tokens.targets, floats[0], tokens.is_demo, mu, floats[0], floats[0], demo_norm=3
        )
        yield name, lengths_launch(tokens.targets, cu_seqlens, tokens.offsets, tokens.lengths, 4)
        yield name, tokens_launch(tokens, floats, inputs, spec, 1)


def compile_triton(configuration: Configuration, arch: str) -> Report:
    """Compile one launch as Triton would for 16-byte aligned pointers on a GPU of this `arch`.

    arch: compute capability times 10, such as "90", or the name of an AMD GPU, such as "gfx942".
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .backends.triton.launch import launch_warps

    name, launch = configuration
    signature, constants, attributes = _specialize(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    amd = arch.startswith("gfx")
    # AMD's data-center GPUs, gfx9, have 64 threads per warp
    target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    target = target if amd else GPUTarget("cuda", int(arch), 32)
    options = {
        "num_warps": launch_warps(launch.warps, target.warp_size),
        "enable_fp_fusion": True,
    }
    triton.knobs.compilation.always_compile = True  # a cached kernel leaves no ptxas log
    triton.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=target, options=options)
    title, shared = (launch.kernel.__name__, name), compiled.metadata.shared
    if amd:
        return _amd_report(*title, arch, compiled.asm["amdgcn"], shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        sass = _disassemble(file.name)
    exponentials = 1 if launch.arguments.get("softcap") is None else 2
    return _report(*title, arch, log.getvalue(), sass, shared, exponentials)


def _report(
    kernel: str,
    config: str,
    arch: str,
    log: str,  # of ptxas
    sass: str,
    shared: int,
    exponentials: int = 1,
) -> Report:
    return Report(
        kernel=kernel,
        config=config,
        arch=f"sm_{arch}",
        registers=_number(r"Used (\d+) registers", log),
        spills=sum(_number(rf"(\d+) bytes spill {x}", log) for x in ("stores", "loads")),
        stack=_number(r"(\d+) bytes stack frame", log),
        shared=shared,
        instructions=len(INSTRUCTION.findall(sass)),
        wide_accesses=len(WIDE_ACCESS.findall(sass)),
        exponentials=exponentials,
        assembly=sass,
    )


def _amd_report(kernel: str, config: str, arch: str, assembly: str, shared: int) -> Report:
    """Read the statistics from the assembly of an AMD GPU; a spilled register takes four bytes."""
    spilled = sum(_number(rf"\.{x}gpr_spill_count:\s+(\d+)", assembly) for x in "vs")
    return Report(
        kernel=kernel,
        config=config,
        arch=arch,
        registers=_number(r"\.vgpr_count:\s+(\d+)", assembly),
        spills=2 * 4 * spilled,
        stack=_number(r"\.private_segment_fixed_size:\s+(\d+)", assembly),
        shared=shared,
        instructions=len(AMD_INSTRUCTION.findall(assembly)),
        wide_accesses=len(AMD_WIDE_ACCESS.findall(assembly)),
        exponentials=1,
        assembly=assembly,
    )


def _disassemble(cubin: str) -> str:
    import triton

    command = [triton.knobs.nvidia.nvdisasm.path, "-c", cubin]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def _specialize(launch: Any) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Triton's view of the arguments: types, constants, and which are divisible by 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
            continue
        aligned = not parameter.do_not_specialize_on_alignment
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + _POINTEES[value.dtype]
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        else:
            signature[name] = parameter.annotation_type or "i32"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


_POINTEES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}


def _number(pattern: str, log: str) -> int:
    match = re.search(pattern, log)
    if match is None:
        raise RuntimeError(f"no match for {pattern!r} in the compiler log:\n{log}")
    return int(match[1])


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
        yield _report(kernel, config, arch, compiled[symbol], text, shared)


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
        for configuration in (*triton_configurations(), *batch_configurations()):
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
