"""Mutation testing: `python -m tools.mutants [MODULE ...]` samples bugs and runs the tests.

Everything runs in a clone of HEAD in a temporary folder. A server that has imported torch,
transformers and pytest forks one process per mutant, which imports the changed file and runs the
tests that cover the changed line, fastest first, until one fails. Results are appended to
tests/mutants/results.jsonl, so an interrupted run resumes; tests/mutants/equivalent.json says why a
survivor is equivalent. Writes the table of tests/README.md.
"""

# ruff: noqa: SIM905 - a list of words
from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.mutant_server import Server, read_results, read_triage
from tools.mutations import all_mutants
from tools.native_mutants import TESTS, NativeServer
from tools.pages import ROOT, fill

PAGE = ROOT / "tests" / "README.md"
MODULES = """control methods evaluation rollouts data gac_kernels training faults rewards models
study integrations sandbox config parallel report csrc/cpu csrc/cuda""".split()


@contextlib.contextmanager
def clone() -> Iterator[Path]:
    """Clone HEAD, with the native libraries, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="gac-mutants-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "tree"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(copy)], check=True)
        for library in ROOT.glob("gac_kernels/*.so"):
            shutil.copy2(library, copy / "gac_kernels")
        for script in ROOT.glob("tools/*muta*.py"):
            shutil.copy2(script, copy / "tools")
        yield copy


def namespace() -> list[str]:
    """Command prefix that starts a PID namespace; no mutant can signal outside it or outlive it."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with contextlib.suppress(OSError):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return []


def start(arguments: list[str]) -> int:
    """Run the server in a clone."""
    with clone() as copy:
        data = os.environ.get("GAC_DATA", str(ROOT.parent / "shared" / "data"))
        temporary = copy.parent / "tmp"
        temporary.mkdir()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")]),
            "GAC_DATA": data,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "TMPDIR": str(temporary),
            "TRITON_INTERPRET": "1",
        }
        isolated = namespace()
        command = [*isolated, sys.executable, "-m", "tools.mutants", "--inside", str(ROOT)]
        if isolated:
            command.append("--isolated")
        return subprocess.run(
            [*command, *arguments], cwd=copy, env=environment, check=False
        ).returncode


def table(records: list[dict[str, Any]], reasons: dict[str, str]) -> str:
    """A row per module, then the survivors that are not equivalent."""
    latest = {record["key"]: record for record in records}
    alive = {key for key, record in latest.items() if record["outcome"] == "survived"}
    alive -= reasons.keys()
    rows, total = [], Counter[str]()
    seeds = sorted({record.get("seed", 0) for record in records})[-2:]
    for module in MODULES:
        first: dict[str, dict[str, Any]] = {}
        for record in records:  # a result is replaced if the test that failed was unreliable
            if record["module"] == module and not record.get("again"):
                first[record["key"]] = record
        if not first:
            continue
        count = Counter(latest[key]["outcome"] for key in first)
        equivalent = {k for k in first.keys() & reasons if latest[k]["outcome"] == "survived"}
        for key in first.keys() - equivalent:
            for seed in {first[key].get("seed", 0), "any"}:
                count[f"of {seed}"] += 1
                count[f"first {seed}"] += first[key]["outcome"] != "survived"
        if module not in TESTS:
            alive -= first.keys() - {mutant.key for mutant in all_mutants(module)}
        count["sampled"], count["equivalent"] = len(first), len(equivalent)
        count["left"] = len(alive & first.keys())
        total += count
        rows.append((module, count))
    lines = [
        f"| {module} | {c['sampled']} |"
        + "".join(f" {c[f'first {seed}']} of {c[f'of {seed}']} |" for seed in (*seeds, "any"))
        + f" {c['killed']} | {c['equivalent']} | {c['left']} | {_share(c)} |"
        for module, c in [*rows, ("**all**", total)]
    ]
    columns = ["module", "sampled", *(f"at first, seed {seed}" for seed in seeds), "at first"]
    columns += ["killed", "equivalent", "survived", "noticed"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *lines]
    return "\n".join([*lines, "", *(f"- survived: `{key}`" for key in sorted(alive))]).strip()


def _share(count: Counter[str]) -> str:
    return f"{100 * count['killed'] / (count['killed'] + count['left'] or 1):.1f}%"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="MODULE")
    parser.add_argument("--sample", type=int, default=32, help="mutants per module (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--cap", type=float, default=20, help="seconds of tests per mutant (20)")
    parser.add_argument(
        "--again",
        nargs="?",
        const="survived",
        default="",
        metavar="OUTCOMES",
        help="run recorded mutants again: the survivors, or, e.g., survived,killed",
    )
    parser.add_argument("--page", action="store_true", help="only write the table")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.modules) - set(MODULES):
        parser.error(f"unknown module {min(unknown)!r}; choose from {', '.join(MODULES)}")
    if unknown := set(filter(None, options.again.split(","))) - {"survived", "killed"}:
        parser.error(f"--again {min(unknown)!r}: use survived, killed or both: survived,killed")
    if options.inside:
        server, native = (kind(Path(options.inside), options) for kind in (Server, NativeServer))
        for module in options.modules:
            (native if module in TESTS else server).sample(module)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the clone
    status = 0 if options.page else start(sys.argv[1:])
    fill(PAGE, "mutants", table(read_results(ROOT), read_triage(ROOT)))
    return status


if __name__ == "__main__":
    sys.exit(main())
