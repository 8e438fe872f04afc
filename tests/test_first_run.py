"""The program of the first GPU run, without a GPU: failing and hanging steps, peers' wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench import first_run, watchdog

HANGING = """
import os, time, pytest
def test_passes(): pass
def test_hangs(): time.sleep(60)
def test_ends_the_process(): os._exit(7)
def test_fails(): assert False
@pytest.mark.skip(reason="not here")
def test_is_skipped(): pass
def test_comes_last(): pass
"""


HANG = "import time; time.sleep(60)"


def test_every_part_fits_in_ten_minutes() -> None:
    assert list(first_run.PARTS) == [1, 2, 3, 4, 5]
    for steps in first_run.PARTS.values():
        assert sum(step.seconds for step in steps) <= first_run.PART_SECONDS
        assert len({step.name for step in steps}) == len(steps)


def test_modules_and_files_of_the_steps_exist() -> None:
    """Runnable modules and test files."""
    for step in (step for steps in first_run.PARTS.values() for step in steps):
        arguments = list(step.command)
        modules = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "-m"]
        for module in (m for m in modules if m != "gpu"):
            assert (first_run.ROOT / f"{module.replace('.', '/')}.py").exists(), module
        for argument in (w for w in arguments if w.endswith(".py")):
            assert (first_run.ROOT / argument).exists(), argument


def test_parts_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["--part", "2", "--list"]) == 0
    assert "compute-sanitizer --tool memcheck" in capsys.readouterr().out


def test_a_failed_step_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails, one hangs in a child process, one lacks its tool; the last one imports a peer's
    wheel.
    """
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_peer_of_ours.py", "answer = 42\n")
    results = tmp_path / "results"
    monkeypatch.setenv("GAC_WHEELS", str(wheels))
    monkeypatch.setattr(first_run, "RESULTS", results)
    hang = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HANG!r}])"
    steps = [
        first_run.Step("fails", 60, [sys.executable, "-c", "print('why'); raise SystemExit(3)"]),
        first_run.Step("hangs", 2, [sys.executable, "-c", hang]),
        first_run.Step("missing", 60, ["no-such-tool"]),
        first_run.Step("peer", 60, [sys.executable, "-c", "from a_peer_of_ours import answer"]),
    ]
    outcomes = first_run.run_part(steps, results / "part", tmp_path / "out")
    assert outcomes == {
        "fails": "failed with exit code 3",
        "hangs": "timed out after 2 s",
        "missing": "skipped: no-such-tool is not on the PATH",
        "peer": "done",
    }
    assert (tmp_path / "out" / "results" / "part" / "1-fails.txt").read_text() == "why\n"
    summary = (tmp_path / "out" / "results" / "part" / "summary.txt").read_text()
    assert [line.split(":")[0] for line in summary.splitlines()] == list(outcomes)


def test_tests_that_hang_or_exit_the_process_do_not_stop_the_run(tmp_path: Path) -> None:
    """Each test has a time limit, without an extra pytest plugin."""
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGING)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    code = f"""
from bench import watchdog
import json
outcome = watchdog.run(["-q", {str(file)!r}, "--rootdir", {str(tmp_path)!r}], limit=5, seconds=120)
names = [[name.split("::")[1] for name in part] for part in outcome[:4]]
print(json.dumps([*names, outcome.incomplete]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=first_run.ROOT,
        env=environment,
        check=True,
    )
    assert json.loads(result.stdout.splitlines()[-1]) == [
        ["test_passes", "test_comes_last"],
        ["test_fails"],
        ["test_is_skipped"],
        ["test_hangs", "test_ends_the_process"],
        False,
    ]


def test_a_run_out_of_time_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_session", lambda *_: [{"began": "a::b"}])
    outcome = watchdog.run([], limit=1, seconds=0)
    assert outcome.hung == ["a::b"] and outcome.incomplete
