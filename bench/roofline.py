"""docs/roofline.md: what each kernel must move, compute and issue, and how near a run came to it.

`python -m bench.roofline` writes the page from counts and the newest GPU results; `--count` first
compiles the kernels (nvcc and Triton, no GPU) and counts their instructions anew.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from .batches import HEADS, Head
from .table import NOT_MEASURED, find, markdown, newest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "roofline.md"
COUNTS = Path(__file__).parent / "instructions.json"
TOKENS = 8192
CHUNK = 2304  # rows of a chunk of the linear form
SHAPES = ("Qwen2.5-1.5B", "Qwen2.5-7B")


class Limits(NamedTuple):
    """Of one device."""

    bytes: float  # per second
    flops: float  # per second, bfloat16 into float32
    instructions: float  # per second, of single threads


# 132 multiprocessors issue 4 x 32 instructions of threads per clock; at 1.83 GHz their 4096 FLOPs
# per clock make the data sheet's 989 TFLOP/s.
H200 = Limits(4.8e12, 989e12, 132 * 4 * 32 * 1.83e9)
ASSUMED = H200._replace(bytes=4.3e12, flops=790e12)


class Kernel(NamedTuple):
    """A row kernel on given logits, or on a chunk's."""

    name: str
    task: str
    count: str  # its key among the counted instructions
    bytes: int  # per logit, if no cache helps
    flops: int  # per logit, a multiply-add is two
    provider: str | None  # of the benchmark that times it


# FLOPs of a logit in the two passes: largest, multiply-add, exponential, sum, floor, multiply-add;
# multiply-add, exponential, product
SUMS, GRADIENT = 8, 4
GIVEN = (
    Kernel("Triton", "stats", "stats_kernel V=151936 bfloat16", 2, SUMS,
           "ours, Triton, forward only"),
    Kernel("Triton", "grads", "grads_kernel V=151936 bfloat16", 4, GRADIENT, None),
    Kernel("Triton", "loss", "loss_kernel V=151936 bfloat16, default", 6, SUMS + GRADIENT,
           "ours, Triton"),
    Kernel("csrc", "stats", "row_kernel bfloat16 to bfloat16", 2, SUMS,
           "ours, csrc, forward only"),
    Kernel("csrc", "grads", "row_kernel bfloat16 to bfloat16", 4, SUMS + GRADIENT, None),
    Kernel("csrc", "loss", "row_kernel bfloat16 to bfloat16", 4, SUMS + GRADIENT, "ours, csrc"),
)  # fmt: skip
LINEAR = (
    Kernel("Triton", "stats", "stats_kernel V=151936 float32", 4, SUMS, "ours, forward only"),
    Kernel("Triton", "loss", "loss_kernel V=151936 float32 to bfloat16, default", 10,
           SUMS + GRADIENT, "ours"),
    Kernel("csrc", "stats", "row_kernel float32 to bfloat16", 4, SUMS, None),
    Kernel("csrc", "loss", "row_kernel float32 to bfloat16", 6, SUMS + GRADIENT,
           "ours, rows by csrc"),
    Kernel("csrc with sketch", "loss", "sketch_kernel float32 to bfloat16", 6,
           SUMS + GRADIENT + 2, None),
)  # fmt: skip
PRODUCTS = {"stats": 2, "loss": 6}  # FLOPs per N H V


def instructions(kernel: Kernel, counts: dict[str, Any]) -> float:
    """Of a thread per logit, in the passes that the task takes."""
    sums, gradient = counts["sm_90"][kernel.count]
    if kernel.task == "stats":
        return sums
    if kernel.task == "grads" and kernel.name == "Triton":  # the sums are given
        return gradient
    return sums + gradient


class Bound(NamedTuple):
    """Milliseconds that a kernel takes at least."""

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


def given(counts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    body = []
    for shape in SHAPES:
        for kernel in GIVEN:
            least = bound(kernel, HEADS[shape], counts, H200)
            run = find(rows, work="logits", shape=shape, tokens=TOKENS, provider=kernel.provider)
            body.append([
                shape, f"{kernel.name} {kernel.task}", str(kernel.bytes), str(kernel.flops),
                f"{instructions(kernel, counts):.1f}", f"{least.memory:.2f}", f"{least.issue:.2f}",
                least.name, f"{bound(kernel, HEADS[shape], counts, ASSUMED).ms:.2f}",
                f"{least.ms / run['ms']:.0%}" if run else NOT_MEASURED,
            ])  # fmt: skip
    head = ["head", "kernel", "bytes per logit", "FLOPs", "instructions", "ms, memory", "ms, issue",
            "bound", "ms if 4.3 TB/s", "share of the bound reached"]  # fmt: skip
    return markdown(head, body)


def linear(counts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    body = []
    for shape in SHAPES:
        head = HEADS[shape]
        for kernel in LINEAR:
            flops = PRODUCTS[kernel.task] * TOKENS * head.hidden * head.vocab
            least = bound(kernel, head, counts, H200)
            assumed = bound(kernel, head, counts, ASSUMED)
            chunks = -(-TOKENS // CHUNK) if kernel.task == "loss" else 0
            sums = 8 * chunks * head.hidden * head.vocab
            products = 1e3 * flops / H200.flops
            run = find(rows, work="linear", shape=shape, tokens=TOKENS, provider=kernel.provider)
            body.append([
                shape, f"{kernel.name} {kernel.task}", f"{flops / 1e12:.1f}", f"{products:.2f}",
                str(kernel.bytes), f"{instructions(kernel, counts):.1f}", f"{least.ms:.2f}",
                least.name, f"{1e3 * sums / H200.bytes:.2f}", f"{1 + least.ms / products:.3f}",
                f"{1 + assumed.ms / (1e3 * flops / ASSUMED.flops):.3f}",
                f"{(products + least.ms) / run['ms']:.0%}" if run else NOT_MEASURED,
            ])  # fmt: skip
    head = ["head", "rows by", "TFLOP", "ms, products", "bytes per logit", "instructions",
            "ms, rows", "bound of the rows", "ms, traffic of dW", "time / products",
            "if 4.3 TB/s, 790 TFLOP/s", "share of the bound reached"]  # fmt: skip
    return markdown(head, [row if row[8] != "0.00" else [*row[:8], "", *row[9:]] for row in body])


def page(counts: dict[str, Any], document: dict[str, Any] | None) -> str:
    rows = document["rows"] if document else []
    issue = f"{H200.instructions / 1e12:.1f} T/s of threads"
    source = (
        f"Runs: {document['device']}, {document['date']}."
        if document
        else f"Runs: {NOT_MEASURED}; `python3 -m bench.first_run` makes them in parts 3 and 4."
    )
    return f"""# Roofline

Written by `python -m bench.roofline`; nobody types a number here. {TOKENS} tokens. Bytes and FLOPs
are counts; instructions are those of a thread per logit in the machine code for sm_90
(`bench/instructions.json`: nvcc {counts["nvcc"]}, Triton {counts["triton"]}).
{source}

## Limits

| limit of an H200 | | source |
|---|---|---|
| memory | 4.8 TB/s | NVIDIA H200 data sheet |
| products in bfloat16 | 989 TFLOP/s | the same: 1979 with sparsity, half without |
| instructions | {issue} | NVIDIA H100 white paper, see below |

The last is 132 multiprocessors x 4 schedulers x 32 threads x 1.83 GHz, the clock at which 4096
FLOPs of each multiprocessor make 989 TFLOP/s. Columns with "if" take 4.3 TB/s and 790 TFLOP/s
instead: assumptions about what a run reaches, not measured here.

## Given logits, bfloat16

`stats` gives log-probs and entropy, `grads` their gradient, `loss` loss and gradient at once.
Triton reads a row twice; what the L2 keeps of it between the passes is not counted.

{given(counts, rows)}

## Linear form, bfloat16

The rows are a chunk's logits in float32 and their gradient in bfloat16. "time / products" is what
the rows add if nothing overlaps: the floor of the target of 1.08. The traffic of dW (8 H V bytes
for each chunk of {CHUNK} rows) runs beside the product that causes it. `stats` has one product,
`loss` three.

{linear(counts, rows)}
"""


def count() -> dict[str, Any]:
    """Instructions per logit of every row kernel that the page names, and csrc's on sm_100."""
    import triton

    from gac_kernels import build_cuda, inspect, inspect_cuda

    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        raise RuntimeError("counting needs nvcc: put it on the PATH or set CUDA_HOME")
    counts: dict[str, Any] = {
        "nvcc": nvcc_release(nvcc), "triton": triton.__version__, "sm_90": {}, "sm_100": {},
    }  # fmt: skip
    for arch in (90, 100):
        for kernel in inspect_cuda.compile_kernels(arch):
            if kernel.kernel != "scale_kernel":
                counts[f"sm_{arch}"][inspect_cuda.title(kernel)] = list(kernel.passes)
    wanted = {kernel.count for kernel in (*GIVEN, *LINEAR)}
    for configuration in inspect.triton_configurations():
        name = f"{configuration.launch.kernel.__name__} {configuration.name}"
        if name in wanted:
            report = inspect.compile_triton(configuration, 90)
            counts["sm_90"][name] = [report.sums, report.gradient]
    for arch in ("sm_90", "sm_100"):  # JSON has no nan: a kernel without the pass
        counts[arch] = {
            name: [None if math.isnan(x) else x for x in both]
            for name, both in counts[arch].items()
        }
    return counts


def nvcc_release(nvcc: str) -> str:
    """Such as "13.0"."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return re.search(r"release ([\d.]+)", done.stdout)[1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__)
    parser.add_argument("--count", action="store_true", help="compile, and count instructions anew")
    if parser.parse_args(arguments).count:
        COUNTS.write_text(json.dumps(count(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(COUNTS.read_text()), newest("cuda")))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
