"""The first run on a GPU, in parts of at most ten minutes: `python3 -m bench.first_run --part 1`.

Each part is a list of steps. A step is a process with a time limit; if it fails, the next one still
runs. Its output goes to bench/results/first-run/ and its measurements to bench/results/;
after every step both are copied to the folder given by the environment variable OUT. Requires
torch, triton, transformers, pytest and nvcc; peers are benchmarked if their wheels are in
bench/wheels/ (or in the folder given by GAC_WHEELS):

    python3 -m pip download --no-deps -d bench/wheels -r requirements/peers.txt
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .record import RESULTS

ROOT = Path(__file__).resolve().parents[1]
WHEELS = Path(__file__).parent / "wheels"
PART_SECONDS = 600
SHARE = 0.95  # fraction of a step's time limit for its tests; the rest is for their report


class Step(NamedTuple):
    """A process of a part, with its time limit."""

    name: str
    seconds: int
    command: Sequence[str]


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def guarded(name: str, seconds: int, limit: int, *arguments: str) -> Step:
    """A step that runs tests that may hang; each test has at most `limit` seconds."""
    command = python(
        "bench.watchdog",
        "--limit",
        str(limit),
        "--seconds",
        str(int(SHARE * seconds)),
        "-q",
        "-s",
        "-m",
        "gpu",
        *arguments,
    )
    return Step(name, seconds, command)


def tiny(*options: str) -> list[str]:
    """Command for a native case small enough for a sanitizer; the 15 bytes that a bulk load may
    read past a row are inside the allocation.
    """
    return python("bench.row_case", "--rows", "40", "--vocab", "50257", *options)


def sanitizer(tool: str, *options: str) -> list[str]:
    return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *tiny(*options)]


def ncu(*options: str) -> list[str]:
    sections = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "MemoryWorkloadAnalysis")
    return [
        "ncu",
        "--clock-control",
        "none",
        "-k",
        "regex:row_kernel|loss_kernel",
        "-c",
        "3",
        *(word for s in sections for word in ("--section", s)),
        *python("bench.row_case", *options),
    ]


WIDE = ("--dtype", "float32", "--rows", "1408")
LINEAR = "bench/bench_gpu_linear.py"
PARTS: dict[int, tuple[Step, ...]] = {
    1: (
        Step("the device", 15, ["nvidia-smi"]),
        Step("build", 120, python("gac_kernels.build_cuda")),
        Step("smoke triton", 90, python("bench.smoke", "triton", "cuda")),
        Step("smoke native", 90, python("bench.smoke", "native", "cuda")),
        Step("GEMMs", 110, python("bench.gemm_probe")),
        guarded("Triton tests", 165, 90, "tests/test_triton_gpu.py", "tests/test_batch.py"),
    ),
    2: (
        Step("build", 120, python("gac_kernels.build_cuda")),
        guarded("linear-form tests", 150, 90, "tests/test_linear_gpu.py"),
        guarded("csrc tests", 150, 90, "tests/test_cuda_gpu.py"),
        Step("memcheck, separate output", 45, sanitizer("memcheck")),
        Step("memcheck, in place", 45, sanitizer("memcheck", "--overwrite")),
        Step("synccheck, separate output", 45, sanitizer("synccheck")),
        Step("synccheck, in place", 45, sanitizer("synccheck", "--overwrite")),
    ),
    3: (
        Step("build", 120, python("gac_kernels.build_cuda")),
        guarded("logits-level loss", 240, 90, "bench/bench_gpu_logits.py"),
        guarded("small batches", 120, 60, "bench/bench_gpu_small.py"),
        Step("profile csrc bfloat16", 30, ncu("--backend", "native")),
        Step("profile csrc float32 to bfloat16", 30, ncu("--backend", "native", *WIDE)),
        Step("profile Triton bfloat16", 30, ncu("--backend", "triton")),
        Step("profile Triton float32 to bfloat16", 30, ncu("--backend", "triton", *WIDE)),
    ),
    4: (
        Step("build", 120, python("gac_kernels.build_cuda")),
        guarded("linear, 7B", 240, 150, LINEAR, "-k", "Qwen2.5-7B"),
        guarded("linear, other heads", 230, 90, LINEAR, "-k", "not Qwen2.5-7B"),
    ),
    5: (
        Step("build", 120, python("gac_kernels.build_cuda")),
        guarded("csrc tests", 110, 90, "tests/test_cuda_gpu.py"),
        guarded(
            "logits-level loss, 7B", 120, 90, "bench/bench_gpu_logits.py", "-k", "7B or splits"
        ),
        guarded("linear, 7B", 220, 150, LINEAR, "-k", "Qwen2.5-7B"),
        Step("tables", 20, python("bench.table")),
    ),
}


def run_step(step: Step, log: Path, environment: dict[str, str]) -> str:
    """Run a step in its own process group; returns "done" or the reason why it failed."""
    if shutil.which(step.command[0]) is None:
        return f"skipped: {step.command[0]} is not on the PATH"
    with log.open("w") as text:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=environment,
            stdout=text,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=step.seconds)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):  # kills leftover child processes too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code is None:
        return f"timed out after {step.seconds} s"
    return "done" if code == 0 else f"failed with exit code {code}"


def peers(folder: Path, into: Path) -> list[str]:
    """Unpack the wheels in `folder` and return their names; pure-Python wheels work without an
    install.
    """
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return [wheel.name for wheel in wheels]


def run_part(steps: Sequence[Step], folder: Path, out: Path | None) -> dict[str, str]:
    """Run every step in order; returns the outcome of each."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    with tempfile.TemporaryDirectory() as unpacked:
        names = peers(Path(os.environ.get("GAC_WHEELS", WHEELS)), Path(unpacked))
        print(f"peers' wheels: {', '.join(names) or 'none'}", flush=True)
        path = [str(ROOT), os.environ.get("PYTHONPATH", ""), unpacked]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        for number, step in enumerate(steps, 1):
            start = time.monotonic()
            log = folder / f"{number}-{step.name.replace(' ', '-').replace(',', '')}.txt"
            outcomes[step.name] = run_step(step, log, environment)
            line = f"{step.name}: {outcomes[step.name]} ({time.monotonic() - start:.0f} s)"
            print(line, flush=True)
            with (folder / "summary.txt").open("a") as summary:
                summary.write(line + "\n")
            if log.exists() and outcomes[step.name] != "done":
                print("\n".join(log.read_text().splitlines()[-15:]), flush=True)
            if out:
                shutil.copytree(RESULTS, out / "results", dirs_exist_ok=True)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", type=int, choices=PARTS, required=True)
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for step in PARTS[chosen.part]:
            print(f"{step.seconds:4} s  {step.name}: {' '.join(step.command)}")
        return 0
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    folder = RESULTS / "first-run" / f"part-{chosen.part}"
    outcomes = run_part(PARTS[chosen.part], folder, out)
    return 0 if set(outcomes.values()) == {"done"} else 1


if __name__ == "__main__":
    sys.exit(main())
