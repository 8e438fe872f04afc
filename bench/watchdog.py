"""Tests that may hang: `python -m bench.watchdog --limit 60 --seconds 150 tests/test_x.py ...`.

pytest runs in a process of its own, which ends when a test takes longer than the limit, or when one
leaves the GPU in an error that every later test would meet. The tests that have not begun then go
on in a new process. Nothing but pytest is needed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT, LOG = "GAC_WATCHDOG_LIMIT", "GAC_WATCHDOG_LOG"  # the plugin's two arguments


class Outcome(NamedTuple):
    """What became of the tests, each under its id."""

    passed: list[str]
    failed: list[str]
    skipped: list[str]
    hung: list[str]  # or ended the process in another way
    not_begun: bool  # time was up before all had begun


# --- in the process of the tests: a plugin of pytest


def note(**event: str) -> None:
    with Path(os.environ[LOG]).open("a") as log:
        log.write(json.dumps(event) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    note(began=item.nodeid)
    faulthandler.dump_traceback_later(float(os.environ[LIMIT]), exit=True, file=sys.__stderr__)
    result = yield
    faulthandler.cancel_dump_traceback_later()
    if device_is_lost():
        note(lost=item.nodeid)
        os._exit(1)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        note(test=report.nodeid, outcome=report.outcome)


def pytest_sessionfinish() -> None:
    note(end="")


def device_is_lost() -> bool:
    """Whether the GPU refuses all further work of this process."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# --- outside


def run(arguments: list[str], limit: float, seconds: float) -> Outcome:
    """pytest with these arguments, anew after each test that ended its process."""
    stop = time.monotonic() + seconds
    events: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        while True:
            log.write_text("")
            began = [e["began"] for e in events if "began" in e]
            done = _session(arguments, began, log, limit, stop - time.monotonic())
            events += done
            finished = any("end" in e for e in done)
            moved = any("began" in e for e in done)
            if finished or not moved or time.monotonic() >= stop:
                return _outcome(events, finished)


def _session(
    arguments: list[str], begun: list[str], log: Path, limit: float, seconds: float
) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "pytest", "-p", "bench.watchdog", "-p", "no:cacheprovider"]
    command += [*arguments, *(f"--deselect={name}" for name in begun)]
    environment = {**os.environ, LIMIT: str(limit), LOG: str(log)}
    try:
        subprocess.run(command, cwd=ROOT, env=environment, timeout=max(seconds, 1), check=False)
    except subprocess.TimeoutExpired:
        print(f"stopped after {seconds:.0f} s", flush=True)
    return [json.loads(line) for line in log.read_text().splitlines()]


def _outcome(events: list[dict[str, str]], finished: bool) -> Outcome:
    outcomes = {e["test"]: e["outcome"] for e in events if "test" in e}
    begun = [e["began"] for e in events if "began" in e]

    def those(outcome: str) -> list[str]:
        return [name for name in begun if outcomes.get(name) == outcome]

    hung = [name for name in begun if name not in outcomes]
    return Outcome(those("passed"), those("failed"), those("skipped"), hung, not finished)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.watchdog", description=__doc__)
    parser.add_argument("--limit", type=float, required=True, help="seconds of one test")
    parser.add_argument("--seconds", type=float, required=True, help="of all together")
    chosen, rest = parser.parse_known_args(arguments)
    outcome = run(rest, chosen.limit, chosen.seconds)
    print(f"\n{len(outcome.passed)} passed, {len(outcome.skipped)} skipped")
    for name in outcome.failed:
        print(f"failed: {name}")
    for name in outcome.hung:
        print(f"ended its process: {name}")
    if outcome.not_begun:
        print("not all tests have begun")
    return 1 if outcome.failed or outcome.hung or outcome.not_begun else 0


if __name__ == "__main__":
    sys.exit(main())
