"""Runs each adapter's tests against the real package, in a separate environment.

    python -m tests.integrations.environments [NAME ...]

Each file in requirements/integrations defines one environment; its name starts with the package
name. Environments are built under .venv/integrations and rebuilt when their file changes. The exit
code is 1 if any test fails.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted((ROOT / "requirements/integrations").glob("*.txt"))}


def build(name: str) -> Path:
    """Build the environment `name` unless it is up to date; return its Python interpreter."""
    folder = ROOT / ".venv/integrations" / name
    python, stamp = folder / "bin/python", folder / "requirements.sha256"
    digest = hashlib.sha256(FILES[name].read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    print(f"building {folder}", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pins = FILES[name].read_text().splitlines()
    torch = next(line for line in pins if line.startswith("torch=="))
    # torch first, with its exact version: a version range would pull in gigabytes of CUDA packages
    for pip_args in ([torch], ["-r", str(FILES[name])]):
        # --no-deps: the file pins every package, and some of their version bounds conflict
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *pip_args], check=True)
    stamp.write_text(digest)
    return python


def run(name: str) -> bool:
    """Run the tests of the environment `name`; return whether they pass."""
    package = name.split("-")[0]
    python = build(name)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    test = f"tests/integrations/test_{package}.py"
    # import the package first: if that failed, pytest would skip its tests
    for command in (["-c", f"import {package}"], ["-m", "pytest", "-q", "-W", "ignore", test]):
        if subprocess.run([python, *command], cwd=ROOT, env=env, check=False).returncode:
            return False
    return True


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(FILES))
    if unknown:
        print(f"unknown environment {', '.join(unknown)}: use {', '.join(FILES)}")
        return 2
    failed = [name for name in names or FILES if not run(name)]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
