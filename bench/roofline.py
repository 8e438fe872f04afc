"""Generates bench/roofline.md: the bound of each kernel, and the fraction of it that a run reached.

`python -m bench.roofline` writes the page from counts and the newest GPU results; `--count` first
compiles the kernels (with nvcc and Triton, without a GPU) and recounts their instructions.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from gac.evaluation.cells import markdown_table

from .batches import HEADS, Head
from .table import NOT_MEASURED, find, newest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "bench" / "roofline.md"
COUNTS = Path(__file__).parent / "instructions.json"
TOKENS = 8192
CHUNK = 2304  # rows of a chunk of the linear form; with this head, a single chunk has all tokens:
SINGLE_CHUNK = "Qwen2.5-7B"
SHAPES = ("Qwen2.5-1.5B", "Qwen2.5-7B")


class Limits(NamedTuple):
    """Peak rates of one device."""

    bytes: float  # per second
    flops: float  # per second, bfloat16 into float32
    instructions: float  # thread instructions per second


# 132 multiprocessors each issue 4 x 32 thread instructions per clock; at 1.83 GHz, 4096 FLOPs per
# multiprocessor and clock give the data sheet's 989 TFLOP/s.
H200 = Limits(4.8e12, 989e12, 132 * 4 * 32 * 1.83e9)
ASSUMED = H200._replace(bytes=4.3e12, flops=790e12)


class Kernel(NamedTuple):
    """A row kernel, on given logits or on the logits of a chunk."""

    name: str
    task: str
    count: str  # its key in instructions.json
    bytes: int  # per logit, without cache hits
    flops: int  # per logit, a multiply-add is two
    provider: str | None  # name in the benchmark that times it


# FLOPs per logit. First pass: max, multiply-add, exp, add, clamp, multiply-add. Second pass:
# multiply-add, exp, multiply.
SUMS, GRADIENT = 8, 4
GIVEN_LOGITS = (
    Kernel(
        "Triton", "stats", "stats_kernel V=151936 bfloat16", 2, SUMS, "ours, Triton, forward only"
    ),
    Kernel("Triton", "grads", "grads_kernel V=151936 bfloat16", 4, GRADIENT, None),
    Kernel(
        "Triton",
        "loss",
        "loss_kernel V=151936 bfloat16, default",
        6,
        SUMS + GRADIENT,
        "ours, Triton",
    ),
    Kernel("csrc", "stats", "row_kernel bfloat16 to bfloat16", 2, SUMS, "ours, csrc, forward only"),
    Kernel("csrc", "grads", "row_kernel bfloat16 to bfloat16", 4, SUMS + GRADIENT, None),
    Kernel("csrc", "loss", "row_kernel bfloat16 to bfloat16", 4, SUMS + GRADIENT, "ours, csrc"),
)
LINEAR_FORM = (
    Kernel("Triton", "stats", "stats_kernel V=151936 float32", 4, SUMS, "ours, forward only"),
    Kernel(
        "Triton",
        "loss",
        "loss_kernel V=151936 float32 to bfloat16, default",
        10,
        SUMS + GRADIENT,
        "ours",
    ),
    Kernel("csrc", "stats", "row_kernel float32 to bfloat16", 4, SUMS, None),
    Kernel(
        "csrc", "loss", "row_kernel float32 to bfloat16", 6, SUMS + GRADIENT, "ours, rows by csrc"
    ),
    Kernel(
        "csrc with sketch",
        "loss",
        "sketch_kernel float32 to bfloat16",
        6,
        SUMS + GRADIENT + 2,
        None,
    ),
)
GEMM_FLOPS = {"stats": 2, "loss": 6}  # FLOPs per N H V


def instructions(kernel: Kernel, counts: dict[str, Any]) -> float:
    """Thread instructions per logit, summed over the passes that the kernel's task needs."""
    sums, gradient = counts["sm_90"][kernel.count]
    if kernel.task == "stats":
        return sums
    if kernel.task == "grads" and kernel.name == "Triton":  # the sums are inputs
        return gradient
    return sums + gradient


class Bound(NamedTuple):
    """Lower bounds on the time of a kernel, in milliseconds."""

    memory: float
    issue: float

    @property
    def ms(self) -> float:
        return max(self)

    @property
    def name(self) -> str:
        return "memory" if self.memory >= self.issue else "issue"


def bound(kernel: Kernel, head: Head, counts: dict[str, Any], limits: Limits) -> Bound:
    logits = 1e3 * TOKENS * head.vocab
    return Bound(
        logits * kernel.bytes / limits.bytes,
        logits * instructions(kernel, counts) / limits.instructions,
    )


def given_logits(counts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    body = []
    for shape in SHAPES:
        for kernel in GIVEN_LOGITS:
            limit = bound(kernel, HEADS[shape], counts, H200)
            run = find(rows, work="logits", shape=shape, tokens=TOKENS, provider=kernel.provider)
            body.append(
                [
                    shape,
                    f"{kernel.name} {kernel.task}",
                    str(kernel.bytes),
                    str(kernel.flops),
                    f"{instructions(kernel, counts):.1f}",
                    f"{limit.memory:.2f}",
                    f"{limit.issue:.2f}",
                    limit.name,
                    f"{bound(kernel, HEADS[shape], counts, ASSUMED).ms:.2f}",
                    f"{limit.ms / run['ms']:.0%}" if run else NOT_MEASURED,
                ]
            )
    head = (
        "head | kernel | bytes per logit | FLOPs | instructions | ms, memory | ms, issue"
        " | bound | ms at 4.3 TB/s | fraction of the bound reached"
    )
    return markdown_table(head.split(" | "), body)


def linear_form(counts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    body = []
    for shape in SHAPES:
        head = HEADS[shape]
        for kernel in LINEAR_FORM:
            flops = GEMM_FLOPS[kernel.task] * TOKENS * head.hidden * head.vocab
            limit = bound(kernel, head, counts, H200)
            assumed = bound(kernel, head, counts, ASSUMED)
            chunks = -(-TOKENS // CHUNK)
            item_bytes = 2 if shape == SINGLE_CHUNK else 8 * chunks
            sums = item_bytes * head.hidden * head.vocab if kernel.task == "loss" else 0
            gemm_ms = 1e3 * flops / H200.flops
            run = find(rows, work="linear", shape=shape, tokens=TOKENS, provider=kernel.provider)
            body.append(
                [
                    shape,
                    f"{kernel.name} {kernel.task}",
                    f"{flops / 1e12:.1f}",
                    f"{gemm_ms:.2f}",
                    str(kernel.bytes),
                    f"{instructions(kernel, counts):.1f}",
                    f"{limit.ms:.2f}",
                    limit.name,
                    f"{1e3 * sums / H200.bytes:.2f}",
                    f"{1 + limit.ms / gemm_ms:.3f}",
                    f"{1 + assumed.ms / (1e3 * flops / ASSUMED.flops):.3f}",
                    f"{(gemm_ms + limit.ms) / run['ms']:.0%}" if run else NOT_MEASURED,
                ]
            )
    head = (
        "head | row kernel | TFLOP | ms, GEMMs | bytes per logit | instructions | ms, row kernel"
        " | bound of the row kernel | ms, dW traffic | time / GEMMs | at 4.3 TB/s, 790 TFLOP/s"
        " | fraction of the bound reached"
    )
    rows = [row if row[8] != "0.00" else [*row[:8], "", *row[9:]] for row in body]
    return markdown_table(head.split(" | "), rows)


def page(counts: dict[str, Any], document: dict[str, Any] | None) -> str:
    rows = document["rows"] if document else []
    issue = f"{H200.instructions / 1e12:.1f} T thread instructions/s"
    source = (
        f"Runs: {document['device']}, {document['date']}."
        if document
        else f"Runs: {NOT_MEASURED}; run part 2 of `python3 -m bench.first_run`."
    )
    return f"""# Roofline

Generated by `python -m bench.roofline`; do not edit. All figures are for {TOKENS} tokens. Bytes and
FLOPs follow from the algorithm; instructions are thread instructions per logit in the sm_90 machine
code (`bench/instructions.json`: nvcc {counts["nvcc"]}, Triton {counts["triton"]}).
{source}

## Limits

| limit of an H200 | | source |
|---|---|---|
| memory | 4.8 TB/s | NVIDIA H200 data sheet |
| bfloat16 GEMMs | 989 TFLOP/s | the same data sheet: 1979 with sparsity, half that without |
| instructions | {issue} | NVIDIA H100 white paper, see below |

The instruction limit is 132 multiprocessors x 4 schedulers x 32 threads x 1.83 GHz, the clock at
which 4096 FLOPs per multiprocessor and clock give 989 TFLOP/s. Columns with "at" use 4.3 TB/s and
790 TFLOP/s instead: assumed achievable rates, not measured here.

## Given logits, bfloat16

`stats` computes log-probs and entropy, `grads` their gradient, `loss` the loss and its gradient in
one call. Triton reads a row twice; L2 hits in the second pass are not taken into account.

{given_logits(counts, rows)}

## Linear form, bfloat16

The row kernels read a chunk's logits in float32 and write their gradient in bfloat16.
"time / GEMMs" is the total time relative to the GEMMs if nothing overlaps: a lower bound for the
target, 1.08 at H = 3584 and 1.15 at H = 1536. The traffic of dW (8 H V bytes for each chunk of
{CHUNK} rows, or 2 H V for a single chunk, at H = 3584) overlaps with the GEMM that causes it.
`stats` runs one GEMM, `loss` three.

{linear_form(counts, rows)}
"""


def count() -> dict[str, Any]:
    """Instructions per logit of the row kernels in bench/roofline.md; on sm_100, of csrc only."""
    import triton

    from gac_kernels import build_cuda, inspect, inspect_cuda

    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "counting instructions requires nvcc: put it on the PATH or set CUDA_HOME"
        )
    counts: dict[str, Any] = {
        "nvcc": nvcc_release(nvcc),
        "triton": triton.__version__,
        "sm_90": {},
        "sm_100": {},
    }
    for arch in (90, 100):
        for kernel in inspect_cuda.compile_kernels(arch):
            counts[f"sm_{arch}"][inspect_cuda.title(kernel)] = list(kernel.passes)
    keys = {kernel.count for kernel in (*GIVEN_LOGITS, *LINEAR_FORM)}
    for configuration in inspect.triton_configurations():
        name = f"{configuration.launch.kernel.__name__} {configuration.name}"
        if name in keys:
            report = inspect.compile_triton(configuration, "90")
            counts["sm_90"][name] = [report.sums, report.gradient]
    for arch in ("sm_90", "sm_100"):  # JSON has no nan, which marks a kernel without that pass
        counts[arch] = {
            name: [None if math.isnan(x) else x for x in passes]
            for name, passes in counts[arch].items()
        }
    return counts


def nvcc_release(nvcc: str) -> str:
    """The release of nvcc, such as "13.0"."""
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return re.search(r"release ([\d.]+)", output.stdout)[1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__)
    parser.add_argument(
        "--count", action="store_true", help="compile the kernels and recount their instructions"
    )
    if parser.parse_args(arguments).count:
        COUNTS.write_text(json.dumps(count(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(COUNTS.read_text()), newest("cuda")))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
