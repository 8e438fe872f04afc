"""Runs tests that may hang: `python -m bench.watchdog --limit 60 --seconds 150 tests/test_x.py`.

pytest runs in its own process, which exits if a test exceeds the limit or leaves the GPU in an
error state in which every later test would fail. The tests that have not started yet then run in a
new process. Only pytest is required. If every test is skipped, so is the program: it exits with
`settings.SKIPPED` and prints the first test's reason.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from .processes import run_limited
from .settings import skip

ROOT = Path(__file__).resolve().parents[1]
LIMIT, LOG = "GAC_WATCHDOG_LIMIT", "GAC_WATCHDOG_LOG"  # the plugin's two arguments


class Outcome(NamedTuple):
    """Test ids by outcome."""

    passed: list[str]
    failed: list[str]
    skipped: list[str]
    hung: list[str]  # or crashed the process
    incomplete: bool  # time ran out before all tests had started
    reasons: list[str]  # why tests were skipped, without duplicates


# --- in the test process: a pytest plugin


def log_event(**event: str) -> None:
    with Path(os.environ[LOG]).open("a") as log:
        log.write(json.dumps(event) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    log_event(began=item.nodeid)
    faulthandler.dump_traceback_later(float(os.environ[LIMIT]), exit=True, file=sys.__stderr__)
    result = yield
    faulthandler.cancel_dump_traceback_later()
    if device_is_lost():
        log_event(lost=item.nodeid)
        os._exit(1)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        log_event(test=report.nodeid, outcome=report.outcome, reason=reason)


def pytest_sessionfinish() -> None:
    log_event(end="")


def device_is_lost() -> bool:
    """Whether the GPU rejects all further work from this process."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# --- in the parent process


def run(arguments: list[str], limit: float, seconds: float) -> Outcome:
    """Run pytest with these arguments; restart pytest after each test that hung or crashed."""
    stop = time.monotonic() + seconds
    events: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        while True:
            log.write_text("")
            started = [e["began"] for e in events if "began" in e]
            session_events = _session(arguments, started, log, limit, stop - time.monotonic())
            events += session_events
            finished = any("end" in e for e in session_events)
            progressed = any("began" in e for e in session_events)
            if finished or not progressed or time.monotonic() >= stop:
                return _outcome(events, finished)


def _session(
    arguments: list[str], started: list[str], log: Path, limit: float, seconds: float
) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "pytest", "-p", "bench.watchdog", "-p", "no:cacheprovider"]
    command += [*arguments, *(f"--deselect={name}" for name in started)]
    # pytest's own timer would replace the limit: Python has only one such timer
    command += ["-o", "faulthandler_timeout=0"]
    environment = {**os.environ, LIMIT: str(limit), LOG: str(log)}
    if run_limited(command, max(seconds, 1), ROOT, environment) is None:
        print(f"timed out after {seconds:.0f} s", flush=True)
    return [json.loads(line) for line in log.read_text().splitlines()]


def _outcome(events: list[dict[str, str]], finished: bool) -> Outcome:
    outcomes = {e["test"]: e["outcome"] for e in events if "test" in e}
    started = [e["began"] for e in events if "began" in e]

    def with_outcome(outcome: str) -> list[str]:
        return [name for name in started if outcomes.get(name) == outcome]

    hung = [name for name in started if name not in outcomes]
    passed, failed, skipped = map(with_outcome, ("passed", "failed", "skipped"))
    reasons = dict.fromkeys(
        e["reason"].removeprefix("Skipped: ") for e in events if e.get("reason")
    )
    return Outcome(passed, failed, skipped, hung, not finished, list(reasons))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.watchdog", description=__doc__)
    parser.add_argument(
        "--limit", type=float, required=True, help="time limit per test, in seconds"
    )
    parser.add_argument(
        "--seconds", type=float, required=True, help="time limit for all tests together, in seconds"
    )
    options, rest = parser.parse_known_args(arguments)
    outcome = run(rest, options.limit, options.seconds)
    print(f"\n{len(outcome.passed)} passed, {len(outcome.skipped)} skipped")
    for name in outcome.failed:
        print(f"failed: {name}")
    for name in outcome.hung:
        print(f"hung or crashed: {name}")
    if outcome.incomplete:
        print("some tests were not started")
    elif not (outcome.passed or outcome.failed or outcome.hung):
        raise skip("; ".join(outcome.reasons) or "no test was selected")
    return 1 if outcome.failed or outcome.hung or outcome.incomplete else 0


if __name__ == "__main__":
    sys.exit(main())
