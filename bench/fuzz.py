"""Run the long fuzz test and record its result: `python -m bench.fuzz [--seed 0]`.

Runs `pytest -m full tests/kernels/test_fuzz.py`, which checks 10,000 random inputs against the
float64 reference, and writes the result to bench/results/fuzz.json. Takes minutes; returns
pytest's exit status.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import subprocess
import sys

from .record import RESULTS

PACKAGES = ("torch", "hypothesis")
LIMIT = 3 * 3600  # seconds
COUNTS = re.compile(r"(\d+) passing, (\d+) failing, and (\d+) invalid")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    seed = parser.parse_args().seed
    # no cache of earlier failures, so that the inputs depend only on the seed; a longer timeout
    # than the suite's, for a busy machine
    command = [
        "-m",
        "pytest",
        "-q",
        "-m",
        "full",
        "tests/kernels/test_fuzz.py",
        "-p",
        "no:cacheprovider",
        f"--timeout={LIMIT}",
        "-o",
        f"faulthandler_timeout={LIMIT + 60}",
        f"--hypothesis-seed={seed}",
        "--hypothesis-show-statistics",
    ]
    process = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False
    )
    print(process.stdout, process.stderr, sep="\n", file=sys.stderr)
    counts = COUNTS.findall(process.stdout)
    if not counts:
        print("error: pytest's output does not report the number of inputs", file=sys.stderr)
        return process.returncode or 1
    passing, failing, rejected = (sum(map(int, column)) for column in zip(*counts, strict=True))
    result = {
        "command": " ".join(["python", *command]),
        "machine": platform.machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "inputs": passing + failing,
        "passing": passing,
        "failing": failing,
        "rejected": rejected,
        "outcome": "passed" if process.returncode == 0 else "failed",
    }
    (RESULTS / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
