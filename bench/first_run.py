r"""The first run on a GPU, in parts of at most ten minutes: `python3 -m bench.first_run --part 1`.

All parts together take at most 25 minutes, the most valuable first: part 1 checks that everything
works and times the epilogue head, both heads in hot loops and single GEMMs, part 2 times our other
losses and other libraries, part 3 the trainers and sanitizers. Each part is a list of steps. A
step is a process with a time limit; if it fails or hangs, the next one still runs. Measurements go
to bench/results/ as they are made, logs to bench/results/first-run/; new results and one archive of
the logs are also copied to the folder given by the environment variable OUT. Requires torch,
triton, transformers and pytest, and nvcc unless a library was built before:

    python3 -m gac_kernels.build_cuda --arch 90a

Peers are benchmarked if their wheels are in bench/wheels/ (or in the folder given by GAC_WHEELS):

    python3 -m pip download --no-deps --python-version 3.12 -d bench/wheels \
      -r requirements/peers.txt datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19

Git ignores the library and the wheels, so name both when you copy files to the GPU machine.
`--dry-run` runs the same steps on a CPU, with interpreted kernels and tiny sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .processes import adopt_orphans, run_limited
from .settings import DEVICE, RESULTS, SKIPPED, tiny

ROOT = Path(__file__).resolve().parents[1]
WHEELS = Path(__file__).parent / "wheels"
PART_SECONDS = 560  # a command on the GPU machine is killed after 600
TOTAL_SECONDS = 1500  # of half an hour on the machine; the rest is for starts and copies
MIN_SECONDS = 5  # a step does not start with less time left
SHARE = 0.95  # fraction of a step's time limit for its tests; the rest is for their report
SLOWER = tiny(1, 5)  # a dry run may take longer: kernels are interpreted
LOG_BYTES = 4 << 20  # of each log, its end
LAST_LINES = 12  # of each log, on the screen
TOOL_FOLDERS = (  # where profilers are if they are not on the PATH
    "/usr/local/cuda*/bin",
    "/usr/local/cuda*/compute-sanitizer",
    "/usr/local/cuda*/nsight-compute*",
    "/opt/nvidia/nsight-compute/*",
    "/opt/nvidia/nsight-systems/*/bin",
)


class Step(NamedTuple):
    """One process of a benchmark part, and its time limit."""

    name: str
    seconds: int
    command: Sequence[str]


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def guarded(name: str, seconds: int, limit: int, *arguments: str) -> Step:
    """A step that runs tests that may hang; each test has at most `limit` seconds."""
    limits = ["--limit", str(SLOWER * limit), "--seconds", str(int(SLOWER * SHARE * seconds))]
    return Step(name, seconds, python("bench.watchdog", *limits, "-qs", "-m", "gpu", *arguments))


def small_case(*options: str) -> list[str]:
    """Command for a native kernel call that is small enough for a sanitizer.

    A bulk load may read up to 15 bytes past a row; here they are inside the allocation.
    """
    return python("bench.row_case", "--rows", "40", "--vocab", "50257", *options)


def sanitizer(tool: str, *options: str) -> list[str]:
    return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *small_case(*options)]


LINEAR, LOGITS, SMALL = (f"bench/bench_gpu_{name}.py" for name in ("linear", "logits", "small"))
ARCH = tiny((), ("--arch", "90a"))  # default: the device's
PARTS: dict[int, tuple[Step, ...]] = {
    1: (
        Step("device", 10, ["nvidia-smi"]),
        Step("build", 50, python("gac_kernels.build_cuda", *ARCH)),
        Step("smoke triton", 40, python("bench.smoke", "triton", DEVICE)),
        Step("smoke native", 20, python("bench.smoke", "native", DEVICE)),
        guarded("linear-form tests", 60, 40, "tests/kernels/test_linear_gpu.py"),
        Step("epilogue GEMM", 90, python("bench.epilogue_gemm")),
        Step("hot loops", 140, python("bench.hot_loop")),
        guarded("linear, 7B", 100, 60, LINEAR, "-k", "ours and 7B"),
        Step("GEMMs", 30, python("bench.gemm_probe", "--device", DEVICE)),
    ),
    2: (
        guarded("GPU tests", 90, 40, "tests/kernels/test_gpu.py", "tests/kernels/test_batch.py"),
        guarded("linear, 1.5B", 70, 40, LINEAR, "-k", "ours and 1.5B"),
        guarded("logits, 7B", 70, 40, LOGITS, "-k", "ours and 7B"),
        guarded("linear peers, 7B", 120, 50, LINEAR, "-k", "peer and 7B and 8192"),
        guarded("logits, 1.5B", 60, 50, LOGITS, "-k", "ours and 1.5B"),
        guarded("small batches", 50, 30, SMALL),
        guarded("linear peers, 1.5B", 70, 40, LINEAR, "-k", "peer and 1.5B and 8192"),
    ),
    3: (
        Step("trace, 7B", 30, python("bench.trace")),
        Step("TRL trainers", 100, python("bench.bench_trl", "--device", DEVICE)),
        guarded("compiled eager", 60, 50, LINEAR, "-k", "compiled"),
        Step("memcheck, in place", 30, sanitizer("memcheck", "--overwrite")),
        Step("synccheck, in place", 30, sanitizer("synccheck", "--overwrite")),
        guarded("row splits", 40, 30, LOGITS, "-k", "splits"),
        guarded("logits peers", 60, 40, LOGITS, "-k", "peer"),
        Step("overhead", 50, python("bench.overhead", "--cycles", "3")),
        Step("FSDP2, one process", 20, python("bench.fsdp_step")),
        Step("vLLM", 10, python("bench.vllm_logprobs")),
    ),
}


def find_tool(name: str) -> str | None:
    """Path of a program: on the PATH, else in the newest CUDA or Nsight folder that has it."""
    home = os.environ.get("CUDA_HOME")
    patterns = [*(f"{home}/{folder}" for folder in ("bin", "compute-sanitizer") if home)]
    folders = (sorted(Path("/").glob(p.lstrip("/")), reverse=True) for p in TOOL_FOLDERS)
    candidates = [name, *(f"{f}/{name}" for f in [*patterns, *(f for fs in folders for f in fs)])]
    return next(filter(None, map(shutil.which, candidates)), None)


def missing(step: Step) -> str | None:
    """Why a step cannot run, or None."""
    program, *arguments = step.command
    if find_tool(program) is None:
        return f"no {program}"
    module = arguments[1] if arguments[:1] == ["-m"] else None
    if module and importlib.util.find_spec(module) is None:
        return f"no {module}"
    return None


def run_step(step: Step, log: Path, environment: dict[str, str], seconds: float) -> str:
    """Run a step; returns "done", "skipped: REASON" or the reason why it failed."""
    if reason := missing(step):
        return f"skipped: {reason}"
    program, *arguments = step.command
    with log.open("w") as text:
        code = run_limited(
            [find_tool(program) or program, *arguments], seconds, ROOT, environment, text
        )
    if code == SKIPPED:
        return last_lines(log, 1)
    if code is None:
        return f"timed out after {seconds:.0f} s"
    return "done" if code == 0 else f"failed with exit code {code}"


def last_lines(log: Path, count: int) -> str:
    return "\n".join(log.read_text(errors="replace").rstrip().splitlines()[-count:])


def peers(folder: Path, into: Path) -> list[str]:
    """Unpack the wheels in `folder` and return their names; pure-Python wheels work without an
    install.
    """
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return [wheel.name for wheel in wheels]


def run_part(
    steps: Sequence[Step], folder: Path, out: Path | None, seconds: float
) -> dict[str, str]:
    """Run every step in order, within `seconds` in all; returns the outcome of each."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcomes: dict[str, str] = {}
    began, stop = time.time(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as unpacked:
        names = peers(Path(os.environ.get("GAC_WHEELS", WHEELS)), Path(unpacked))
        print(f"peers' wheels: {', '.join(names) or 'none'}", flush=True)
        path = [str(ROOT), os.environ.get("PYTHONPATH", ""), unpacked]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        environment["PYTHONUNBUFFERED"] = "1"  # a killed step's output is complete
        for number, step in enumerate(steps, 1):
            start = time.monotonic()
            log = folder / f"{number}-{step.name.replace(' ', '-').replace(',', '')}.txt"
            limit = min(SLOWER * step.seconds, stop - start)
            if limit < MIN_SECONDS:
                outcomes[step.name] = "skipped: no time left"
            else:
                outcomes[step.name] = run_step(step, log, environment, limit)
            line = f"{step.name}: {outcomes[step.name]} ({time.monotonic() - start:.0f} s)"
            print(line, flush=True)
            with (folder / "summary.txt").open("a") as summary:
                summary.write(line + "\n")
            if log.exists() and not outcomes[step.name].startswith("skipped"):
                print(last_lines(log, LAST_LINES), flush=True)
            if out:
                copy_out(folder, out, began)
    return outcomes


def copy_out(folder: Path, out: Path, since: float) -> None:
    """Copy to `out` the summary, one archive of the logs, and the results written after `since`.

    The GPU machine returns few files, and none from deep folders.
    """
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f"{folder.name}-logs.partial"
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for log in sorted(folder.iterdir()):
            archive.writestr(log.name, log.read_bytes()[-LOG_BYTES:])
    partial.replace(out / f"{folder.name}-logs.zip")
    shutil.copy(folder / "summary.txt", out / f"{folder.name}-summary.txt")
    for path in RESULTS.glob("*.json"):
        if path.stat().st_mtime >= since:
            shutil.copy(path, out)


def dry_run(arguments: Sequence[str]) -> None:
    """Restart this program with a dry run's environment variables, which all steps inherit."""
    out = os.environ.get("OUT") or tempfile.mkdtemp(prefix="gac-dry-run-")
    variables = {
        "OUT": out,
        "GAC_BENCH_DRY_RUN": "1",
        "GAC_BENCH_RESULTS": str(Path(out) / "results"),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    print(f"dry run; its results are in {out}", flush=True)
    os.chdir(ROOT)
    os.execve(sys.executable, python("bench.first_run", *arguments), {**os.environ, **variables})


def interrupt(*_: Any) -> None:
    """Turn a signal into an exception, so that the running step is killed."""
    raise SystemExit(128 + signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", type=int, choices=PARTS, required=True)
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU with tiny sizes")
    chosen = parser.parse_args(arguments)
    steps = PARTS[chosen.part]
    if chosen.list:
        for step in steps:
            print(f"{step.seconds:4} s  {step.name}: {' '.join(step.command)}")
        return 0
    if chosen.dry_run:
        dry_run(["--part", str(chosen.part)])
    signal.signal(signal.SIGTERM, interrupt)
    adopt_orphans()
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    folder = RESULTS / "first-run" / f"part-{chosen.part}"
    outcomes = run_part(steps, folder, out, SLOWER * PART_SECONDS)
    return 0 if all(x == "done" or x.startswith("skipped") for x in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
