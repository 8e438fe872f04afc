"""Generates bench/roofline.md: the bound of each kernel, and the fraction of it that a run reached.

`python -m bench.roofline` writes the page from counts and the newest GPU results; `--count` first
compiles the kernels (with nvcc and Triton, without a GPU) and recounts their instructions.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from gac.evaluation.table import markdown_table
from gac_kernels import projection

from .batches import HEADS, Head
from .table import NOT_MEASURED, find, newest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "bench" / "roofline.md"
COUNTS = Path(__file__).parent / "instructions.json"
TOKENS = 8192
SHAPES = ("Qwen2.5-1.5B", "Qwen2.5-7B")


class Limits(NamedTuple):
    """Peak rates of one device."""

    bytes: float  # per second
    flops: float  # per second, bfloat16 into float32
    instructions: float  # thread instructions per second


PROCESSORS = 132
# Each multiprocessor issues 4 x 32 thread instructions per clock; at 1.83 GHz, 4096 FLOPs per
# multiprocessor and clock give the data sheets' 989 TFLOP/s.
_HOPPER = 989e12, PROCESSORS * 4 * 32 * 1.83e9
DEVICES = {
    "H100": Limits(3.35e12, *_HOPPER),
    "H200": Limits(4.8e12, *_HOPPER),
}
ACHIEVABLE = 0.9, 0.8  # assumed shares of the memory bandwidth and of the FLOPs


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


def chunks(head: Head) -> int:
    """Number of chunks in which the linear form processes all tokens."""
    budget = projection.default_budget("cuda")
    sizes = head.vocab, head.hidden, (4, 2), PROCESSORS
    several, block = projection.chunk_sizes(budget, *sizes)
    # a single chunk may use the memory of the float32 sums that it does not need
    budget += 4 * head.hidden * head.vocab
    single, _ = projection.chunk_sizes(budget, *sizes, block)
    return 1 if single >= TOKENS else -(-TOKENS // several)


def given_logits(counts: dict[str, Any], rows: list[dict[str, Any]], limits: Limits) -> str:
    body = []
    for shape in SHAPES:
        for kernel in GIVEN_LOGITS:
            limit = bound(kernel, HEADS[shape], counts, limits)
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
                    f"{bound(kernel, HEADS[shape], counts, achievable(limits)).ms:.2f}",
                    f"{limit.ms / run['ms']:.0%}" if run else NOT_MEASURED,
                ]
            )
    head = (
        "head | kernel | bytes per logit | FLOPs | instructions | ms, memory | ms, issue"
        " | bound | ms, achievable | fraction of the bound reached"
    )
    return markdown_table(head.split(" | "), body)


def linear_form(counts: dict[str, Any], rows: list[dict[str, Any]], limits: Limits) -> str:
    body = []
    for shape in SHAPES:
        head = HEADS[shape]
        for kernel in LINEAR_FORM:
            flops = GEMM_FLOPS[kernel.task] * TOKENS * head.hidden * head.vocab
            limit = bound(kernel, head, counts, limits)
            rates = achievable(limits)
            slower = bound(kernel, head, counts, rates)
            count = chunks(head)
            traffic = (2 if count == 1 else 8 * count) * head.hidden * head.vocab
            gemm_ms = 1e3 * flops / limits.flops
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
                    str(count) if kernel.task != "stats" else "",
                    f"{1e3 * traffic / limits.bytes:.2f}" if kernel.task != "stats" else "",
                    f"{1 + limit.ms / gemm_ms:.3f}",
                    f"{1 + slower.ms / (1e3 * flops / rates.flops):.3f}",
                    f"{(gemm_ms + limit.ms) / run['ms']:.0%}" if run else NOT_MEASURED,
                ]
            )
    head = (
        "head | row kernel | TFLOP | ms, GEMMs | bytes per logit | instructions | ms, row kernel"
        " | bound of the row kernel | chunks | ms, dW traffic | time / GEMMs | achievable"
        " | fraction of the bound reached"
    )
    return markdown_table(head.split(" | "), body)


def achievable(limits: Limits) -> Limits:
    bandwidth, flops = ACHIEVABLE
    return limits._replace(bytes=bandwidth * limits.bytes, flops=flops * limits.flops)


def section(name: str, counts: dict[str, Any], measured: dict[str, Any] | None) -> str:
    """The tables of one device, with the measurements made on it."""
    limits = DEVICES[name]
    source = (
        f"Runs: {measured['device']}, {measured['date']}."
        if measured
        else f"Runs: {NOT_MEASURED}; run `python3 -m bench.first_run --part 1` (to 3)."
    )
    rows = measured["rows"] if measured else []
    return f"""## {name}

{limits.bytes / 1e12:.2f} TB/s, {limits.flops / 1e12:.0f} TFLOP/s. {source}

Given logits, bfloat16:

{given_logits(counts, rows, limits)}

Linear form, bfloat16:

{linear_form(counts, rows, limits)}
"""


def page(counts: dict[str, Any], documents: dict[str, dict[str, Any] | None]) -> str:
    issue = f"{DEVICES['H100'].instructions / 1e12:.1f} T thread instructions/s"
    bandwidth, flops = ACHIEVABLE
    sections = "\n".join(section(name, counts, documents[name]) for name in DEVICES)
    return f"""# Roofline

Generated by `python -m bench.roofline`; do not edit. All figures are for {TOKENS} tokens. Bytes and
FLOPs follow from the algorithm; instructions are thread instructions per logit in the sm_90 machine
code (`bench/instructions.json`: nvcc {counts["nvcc"]}, Triton {counts["triton"]}).

| limit | H100 SXM | H200 | source |
|---|---|---|---|
| memory | 3.35 TB/s | 4.8 TB/s | NVIDIA data sheets |
| bfloat16 GEMMs | 989 TFLOP/s | 989 TFLOP/s | the same: 1979 with sparsity, half that without |
| instructions | {issue} | the same | NVIDIA H100 white paper, see below |

The instruction limit is {PROCESSORS} multiprocessors x 4 schedulers x 32 threads x 1.83 GHz, the
clock at which 4096 FLOPs per multiprocessor and clock give 989 TFLOP/s. "Achievable" assumes
{bandwidth:.0%} of the bandwidth and {flops:.0%} of the FLOPs; nothing of that was measured here.

Given logits, `stats` computes log-probs and entropy, `grads` their gradient, `loss` the loss and
its gradient in one call. Triton reads a row twice; L2 hits in the second pass are not counted.

In the linear form, the row kernels read a chunk's logits in float32 and write their gradient in
bfloat16; `stats` runs one GEMM, `loss` three. "time / GEMMs" is the total time relative to the
GEMMs if nothing overlaps: a lower bound for the target, 1.08 at H = 3584 and 1.15 at H = 1536. The
traffic of dW (8 H V bytes for each of several chunks, 2 H V for a single one) overlaps with the
GEMM that causes it.

{sections}"""


def count() -> dict[str, Any]:
    """Instructions per logit of the row kernels in bench/roofline.md; on sm_100, of csrc only."""
    import triton

    from bench.sass import per_logit
    from gac_kernels import build_cuda, inspect

    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "counting instructions requires nvcc: put it on the PATH or set CUDA_HOME"
        )
    counts: dict[str, Any] = {
        "nvcc": ".".join(map(str, build_cuda.release(nvcc))),
        "triton": triton.__version__,
        "sm_90": {},
        "sm_100": {},
    }
    reports = [report for arch in ("90", "100") for report in inspect.compile_cuda(arch)]
    keys = {kernel.count for kernel in (*GIVEN_LOGITS, *LINEAR_FORM)}
    for name, launch in inspect.triton_configurations():
        if f"{launch.kernel.__name__} {name}" in keys:
            reports.append(inspect.compile_triton((name, launch), "90"))
    for report in reports:
        counts[report.arch][f"{report.kernel} {report.config}"] = [*per_logit(report)]
    for arch in ("sm_90", "sm_100"):  # JSON has no nan, which marks a kernel without that pass
        counts[arch] = {
            name: [None if math.isnan(x) else x for x in passes]
            for name, passes in counts[arch].items()
        }
    return counts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__)
    parser.add_argument(
        "--count", action="store_true", help="compile the kernels and recount their instructions"
    )
    if parser.parse_args(arguments).count:
        COUNTS.write_text(json.dumps(count(), indent=1) + "\n")
    measured = {name: newest("cuda", name) for name in DEVICES}
    PAGE.write_text(page(json.loads(COUNTS.read_text()), measured))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
