"""The benchmarks' results folder and dry-run flag; imports only the standard library.

A dry run (`python -m bench.first_run --part N --dry-run`) executes the GPU benchmarks on a CPU,
with interpreted Triton kernels and tiny sizes, to find their errors before a GPU is available. Its
times mean nothing, so its results go to a separate folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

DRY_RUN = os.environ.get("GAC_BENCH_DRY_RUN") == "1"
RESULTS = Path(os.environ.get("GAC_BENCH_RESULTS") or Path(__file__).parent / "results")
DEVICE = "cpu" if DRY_RUN else "cuda"
SKIPPED = 77  # exit code of a process that cannot run; its last line of output is "skipped: REASON"
T = TypeVar("T")


def tiny(real: T, in_dry_run: T) -> T:
    """`in_dry_run` in a dry run, otherwise `real`."""
    return in_dry_run if DRY_RUN else real


def skip(reason: str) -> SystemExit:
    """Print why this process cannot run; returns the SystemExit for the caller to raise."""
    print(f"skipped: {reason}", flush=True)
    return SystemExit(SKIPPED)
