"""Run a tiny two-process job many times and count its exit codes.

`python -m tools.exit_codes --runs 100`: torchrun, FSDP2 on CPUs, two steps. A finished job
must exit with code 0 every time, because torchrun restarts the whole job if one rank dies during
shutdown.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", *OPTIONS.split()]
GAC = [sys.executable, "-m", "gac.cli"]
DEADLINE = 300  # timeout of one job, in seconds


def main() -> int:
    """Run the jobs; return 1 if one has another exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--mode", default="fsdp", help="parallel.mode")
    options = parser.parse_args()
    codes: collections.Counter[int] = collections.Counter()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        task = Path(name)
        subprocess.run([*GAC, "init", str(task / "task")], check=True, timeout=DEADLINE)
        for number in range(1, options.runs + 1):
            code, output = run_job(task, number, options.mode)
            codes[code] += 1
            if code:
                print(output)
            print(f"run {number}: exit code {code}", flush=True)
    spent = time.perf_counter() - started
    print(f"{codes[0]} of {options.runs} runs exited with code 0, {spent:.0f} s")
    return int(codes[0] != options.runs)


def run_job(task: Path, number: int, mode: str) -> tuple[int, str]:
    """Run a job; return its exit code and output."""
    changes = ["steps=2", f"out=run-{number}", f"parallel.mode={mode}", "parallel.timeout=60"]
    settings = [part for change in changes for part in ("--set", change)]
    done = subprocess.run(
        [*TORCHRUN, "-m", "gac.cli", "train", "run.yaml", *settings],
        cwd=task / "task",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=DEADLINE,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
