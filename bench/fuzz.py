"""The long run of random inputs, recorded: `python -m bench.fuzz [--seed 0]`.

Runs `pytest -m full tests/test_fuzz.py`, which holds 10,000 drawn inputs against the float64
reference, and writes what it found to bench/results/fuzz.json. Minutes; exits as pytest does.
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
    parser.add_argument("--seed", type=int, default=0, help="what draws the inputs")
    seed = parser.parse_args().seed
    # without the cache of earlier failures, so that the seed alone decides what is drawn; with time
    # for a busy machine, which the suite's limit has not
    command = ["-m", "pytest", "-q", "-m", "full", "tests/test_fuzz.py", "-p", "no:cacheprovider",
               f"--timeout={LIMIT}", "-o", f"faulthandler_timeout={LIMIT + 60}",
               f"--hypothesis-seed={seed}", "--hypothesis-show-statistics"]  # fmt: skip
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    found = COUNTS.findall(done.stdout)
    if not found:
        print("error: pytest did not say how many inputs it drew", file=sys.stderr)
        return done.returncode or 1
    passing, failing, refused = (sum(map(int, column)) for column in zip(*found, strict=True))
    result = {
        "command": " ".join(["python", *command]),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(),
                     **{name: importlib.metadata.version(name) for name in PACKAGES}},
        "inputs": passing + failing,
        "passing": passing,
        "failing": failing,
        "drawn_again": refused,
        "outcome": "passed" if done.returncode == 0 else "failed",
    }  # fmt: skip
    (RESULTS / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
