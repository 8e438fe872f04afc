"""Compiler statistics of every shipped kernel; no GPU is needed.

`python -m gac_kernels.inspect` compiles each kernel for sm_80, sm_90 and sm_100 and prints
registers, spilled bytes, stack, shared memory and instruction counts: in total, and per logit for
the pass that sums a row and the pass that writes its gradient. With `--arch gfx942 gfx950`, it
compiles the Triton kernels for AMD GPUs, where registers are VGPRs and shared memory is LDS;
instructions per logit are counted only for NVIDIA GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .contract import DemoWeight, LossSpec
from .inputs import BatchInputs
from .inspect_sass import passes
from .sketch import RowSketch
from .tokens import Tokens, TokenTerms, plan

ARCHITECTURES = ("80", "90", "100")
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
    spill_stores: int
    """Bytes stored by spills, per thread."""
    spill_loads: int
    """Bytes loaded by spills, per thread."""
    stack: int
    """Stack size in bytes per thread."""
    shared: int
    """Shared memory in bytes per program."""
    instructions: int
    wide_accesses: int
    """Number of global loads and stores of 16 bytes per thread."""
    sums: float
    """Instructions per thread and logit in the hot loop of the first pass; nan if there is none."""
    gradient: float
    """The same for the second pass."""
    seconds: float
    """Time to compile, in seconds."""


class Configuration(NamedTuple):
    """A named kernel launch to compile; `launch` is a `backends.triton.launch.Launch`."""

    name: str
    launch: Any


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
        yield Configuration(name, stats_launch(logits, tokens.targets, 1.0, row.expand(3, 8)))
        yield Configuration(
            name, grads_launch(logits, tokens.targets, row, row, row, row, 1.0, logits)
        )
        yield Configuration(name, scale_launch(logits, row[0], 1))
        yield _loss_configuration(name, "default", logits, logits, tokens)
    logits = torch.empty(2, 4, 151936, dtype=torch.bfloat16, device="meta")
    yield _loss_configuration("no gradient", "default", logits, None, _meta_tokens(ref=False))
    for spec in list(_SPECS)[1:]:
        tokens = _meta_tokens(ref=_SPECS[spec].kl_coef != 0)
        if _SPECS[spec].correction != "none":
            tokens = tokens._replace(factor=tokens.scale, rollout_logps=tokens.scale)
        yield _loss_configuration("V=151936 bfloat16", spec, logits, logits, tokens)
    yield from _softcap_configurations()
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


def _softcap_configurations() -> Iterator[Configuration]:
    """Yield the row kernels with a softcap (statistics kernel: with and without MORE_OUTPUTS)."""
    from .backends.triton.grads import grads_launch
    from .backends.triton.stats import stats_launch

    logits = torch.empty(2, 4, 151936, dtype=torch.bfloat16, device="meta")
    tokens, name, softcap = _meta_tokens(ref=True), "V=151936 bfloat16, softcap", 30.0
    row = logits.new_empty(8, dtype=torch.float32)
    for suffix, results in (("", row.expand(3, 8)), (", more", row.expand(6, 8))):
        launch = stats_launch(logits, tokens.targets, 1.0, results, softcap)
        yield Configuration(name + suffix, launch)
    columns = tokens.targets, row, row, row, row
    yield Configuration(name, grads_launch(logits, *columns, 1.0, logits, softcap))
    yield _loss_configuration(name, "all options", logits, logits, tokens, softcap=softcap)


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
    return Configuration(f"{name}, {spec}", launch)


def _inputs(ref: bool) -> BatchInputs:
    """A batch of 2 x 4 tokens."""
    targets, is_demo = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([False, True])
    logps = torch.zeros(2, 4)
    return BatchInputs(targets, torch.zeros(2), is_demo, 0.5, logps, logps if ref else None)


def _meta_tokens(ref: bool) -> Tokens:
    """The tokens of `_inputs`, on the meta device."""
    tokens = plan(_inputs(ref), LossSpec())
    move = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x  # noqa: E731 - one line
    return Tokens(*(move(x) for x in tokens))


def batch_configurations() -> Iterator[Configuration]:
    """The per-token and per-sequence kernels, with all optional inputs."""
    from .backends.triton.plan import lengths_launch, tokens_launch
    from .backends.triton.reduce import merge_launch, sequence_launch
    from .contract import TokenMoments

    spec = LossSpec(demo_weight=DemoWeight.SHAPED, rollout_reduction="constant", max_tokens=9)
    floats = torch.empty(5, 8, device="meta")
    sums = torch.empty(9, 2, dtype=torch.float64, device="meta")
    for mu, cu_seqlens, name in (
        (0.5, None, "padded"),
        (floats[0, 0], torch.empty(3, dtype=torch.int32, device="meta"), "packed, mu a tensor"),
    ):
        tokens = _meta_tokens(ref=True)._replace(mu=mu)
        inputs = BatchInputs(
            tokens.targets, floats[0], tokens.is_demo, mu, floats[0], floats[0], demo_norm=3
        )
        launches = (
            lengths_launch(tokens.targets, cu_seqlens, tokens.offsets, tokens.lengths, 4),
            tokens_launch(tokens, floats, inputs, spec, 1),
            sequence_launch(tokens, TokenTerms(*floats), sums, TokenMoments(*sums[:3])),
            merge_launch(tokens, sums, floats[0], floats[0], TokenMoments(*sums[:3])),
        )
        yield from (Configuration(name, launch) for launch in launches)


def compile_triton(configuration: Configuration, arch: str) -> Report:
    """Compile one launch as Triton would for 16-byte aligned pointers on a GPU of this `arch`.

    arch: compute capability times 10, such as "90", or the name of an AMD GPU, such as "gfx942".
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .backends.triton.launch import launch_warps

    launch = configuration.launch
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
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=target, options=options)
    seconds = time.perf_counter() - start
    if amd:
        return _amd_report(configuration, arch, compiled, seconds)
    sass = _disassemble(compiled.asm["cubin"])
    counts = passes(sass)  # counts are per exponential; with a softcap, a logit has two
    exponentials = 1 if launch.arguments.get("softcap") is None else 2
    return Report(
        kernel=launch.kernel.__name__,
        config=configuration.name,
        arch=f"sm_{arch}",
        registers=_number(r"Used (\d+) registers", log.getvalue()),
        spill_stores=_number(r"(\d+) bytes spill stores", log.getvalue()),
        spill_loads=_number(r"(\d+) bytes spill loads", log.getvalue()),
        stack=_number(r"(\d+) bytes stack frame", log.getvalue()),
        shared=compiled.metadata.shared,
        instructions=len(INSTRUCTION.findall(sass)),
        wide_accesses=len(WIDE_ACCESS.findall(sass)),
        sums=exponentials * counts.sums,
        gradient=exponentials * counts.gradient,
        seconds=seconds,
    )


def _amd_report(configuration: Configuration, arch: str, compiled: Any, seconds: float) -> Report:
    """Read the statistics from the assembly of an AMD GPU; a spilled register takes four bytes."""
    assembly = compiled.asm["amdgcn"]
    spilled = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    spilled += 4 * _number(r"\.sgpr_spill_count:\s+(\d+)", assembly)
    return Report(
        kernel=configuration.launch.kernel.__name__,
        config=configuration.name,
        arch=arch,
        registers=_number(r"\.vgpr_count:\s+(\d+)", assembly),
        spill_stores=spilled,
        spill_loads=spilled,
        stack=_number(r"\.private_segment_fixed_size:\s+(\d+)", assembly),
        shared=compiled.metadata.shared,
        instructions=len(AMD_INSTRUCTION.findall(assembly)),
        wide_accesses=len(AMD_WIDE_ACCESS.findall(assembly)),
        sums=math.nan,
        gradient=math.nan,
        seconds=seconds,
    )


def _disassemble(cubin: bytes) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
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


def triton_reports(architectures: tuple[str, ...]) -> Iterator[Report]:
    """Compile the Triton kernels for each architecture."""
    for configuration in (*triton_configurations(), *batch_configurations()):
        for arch in architectures:
            yield compile_triton(configuration, arch)


def cuda_reports(architectures: tuple[str, ...]) -> Iterator[Report]:
    """Compile the kernels of csrc/cuda for each architecture, if nvcc is found.

    Thread-block clusters need compute capability 9.0.
    """
    from . import build_cuda, inspect_cuda

    if build_cuda.find_nvcc() is None:
        print("nvcc not found: skipping the kernels of csrc/cuda")
        return
    for arch in (int(a) for a in architectures if a.isdigit() and int(a) >= 90):
        for kernel in inspect_cuda.compile_kernels(arch):
            dtypes = " to ".join(str(t).removeprefix("torch.") for t in kernel.dtypes)
            yield Report(
                kernel=kernel.kernel,
                config=f"V={inspect_cuda.VOCAB} {dtypes}",
                arch=f"sm_{arch}",
                registers=kernel.registers,
                spill_stores=kernel.spill_stores,
                spill_loads=kernel.spill_loads,
                stack=kernel.stack,
                shared=kernel.shared,
                instructions=len(INSTRUCTION.findall(kernel.sass)),
                wide_accesses=len(WIDE_ACCESS.findall(kernel.sass)),
                sums=kernel.passes.sums,
                gradient=kernel.passes.gradient,
                seconds=kernel.seconds,
            )


SOURCES: dict[str, Callable[[tuple[str, ...]], Iterator[Report]]] = {
    "triton": triton_reports,
    "cuda": cuda_reports,
}
"""Report sources; add a line here to include another set of kernels."""


def table(reports: list[Report]) -> str:
    """The reports as aligned text."""
    head = tuple(field.replace("_", " ") for field in Report._fields)
    rows = [head, *(tuple(_text(x) for x in report) for report in reports)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _text(value: str | int | float) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.1f}"
    return str(value)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gac_kernels.inspect", description=__doc__)
    parser.add_argument(
        "--arch",
        nargs="+",
        default=ARCHITECTURES,
        help="compute capability times 10, or names of AMD GPUs such as gfx942",
    )
    parser.add_argument("--source", nargs="+", choices=sorted(SOURCES), default=sorted(SOURCES))
    options = parser.parse_args(arguments)
    for arch in options.arch:
        if not re.fullmatch(r"\d{2,3}|gfx\w{3,4}", arch):
            parser.error(f"--arch {arch}: use a number such as 90, or a name such as gfx942")
    interpret = os.environ.get("TRITON_INTERPRET", "0")
    if interpret != "0" and "triton" in options.source:
        parser.error(f"TRITON_INTERPRET={interpret}: unset it; an interpreter compiles nothing")
    reports = [r for source in options.source for r in SOURCES[source](tuple(options.arch))]
    print(table(reports))
    spilled = sum(r.spill_stores + r.spill_loads > 0 for r in reports)
    print(f"\n{len(reports)} kernels compiled, {spilled} with spills")


if __name__ == "__main__":
    main()
