"""The program of the first GPU run, on a CPU: failing and hanging steps, peers' wheels."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench import first_run, settings, watchdog
from tests.sandbox.sandboxes import alive
from tests.waiting import wait_until

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
FIRST_RUN = [sys.executable, "-m", "bench.first_run"]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without pytest's settings, which a new pytest would inherit."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GAC_"))},
        **variables,
    }


def test_every_part_fits_in_ten_minutes_and_all_in_25() -> None:
    assert first_run.PART_SECONDS <= 565
    assert first_run.TOTAL_SECONDS <= 25 * 60
    steps = [step for part in first_run.PARTS.values() for step in part]
    assert sum(step.seconds for step in steps) <= first_run.TOTAL_SECONDS
    assert len({step.name for step in steps}) == len(steps)
    for part in first_run.PARTS.values():
        assert sum(step.seconds for step in part) <= first_run.PART_SECONDS


def test_modules_and_files_of_the_steps_exist() -> None:
    """Runnable modules and test files; `bench_trl` is optional."""
    for step in (step for steps in first_run.PARTS.values() for step in steps):
        arguments = list(step.command)
        modules = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "-m"]
        for module in (m for m in modules if m not in ("gpu", "bench.bench_trl")):
            assert (first_run.ROOT / f"{module.replace('.', '/')}.py").exists(), module
        for argument in (w for w in arguments if w.endswith(".py")):
            assert (first_run.ROOT / argument).exists(), argument


def test_parts_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["--part", "3", "--list"]) == 0
    assert "compute-sanitizer --tool memcheck" in capsys.readouterr().out


SKIPS = "from bench.settings import skip; raise skip('no such device')"
WRITES = """
import sys
from bench.record import Record
record = Record()
record.add(device="cpu", work="w", shape="s", tokens=1, case="", provider="first", ms=1.0)
record.save()
print("x" * 100_000, flush=True)
import os; os.kill(os.getpid(), 9)
"""


def test_a_failed_step_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps fail, hang in a child process, lack their tool or device, or find no time left; one
    imports a peer's wheel. Their output comes back as a few files in one folder, without results of
    other days.
    """
    wheels, results, out = (tmp_path / name for name in ("wheels", "results", "out"))
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_peer_of_ours.py", "answer = 42\n")
    results.mkdir()
    (results / "old.json").write_text("{}")
    os.utime(results / "old.json", (0, 0))
    monkeypatch.setenv("GAC_WHEELS", str(wheels))
    monkeypatch.setenv("GAC_BENCH_RESULTS", str(results))
    monkeypatch.setattr(first_run, "RESULTS", results)
    monkeypatch.setattr(first_run, "MIN_SECONDS", 1)
    hang = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HANG!r}])"
    run = [sys.executable, "-c"]
    steps = [
        first_run.Step("fails", 60, [*run, "print('why'); raise SystemExit(3)"]),
        first_run.Step("hangs", 2, [*run, hang]),
        first_run.Step("writes", 60, [*run, WRITES]),
        first_run.Step("no tool", 60, ["no-such-tool"]),
        first_run.Step("no module", 60, first_run.python("bench.no_such_module")),
        first_run.Step("skips", 60, [*run, SKIPS]),
        first_run.Step("peer", 60, [*run, "from a_peer_of_ours import answer"]),
    ]
    outcomes = first_run.run_part(steps, results / "first-run" / "part-9", out, seconds=200)
    assert outcomes == {
        "fails": "failed with exit code 3",
        "hangs": "timed out after 2 s",
        "writes": "failed with exit code -9",
        "no tool": "skipped: no no-such-tool",
        "no module": "skipped: no bench.no_such_module",
        "skips": "skipped: no such device",
        "peer": "done",
    }
    (rows,) = (p for p in out.iterdir() if p.suffix == ".json")
    assert json.loads(rows.read_text())["rows"][0]["provider"] == "first"
    files = [p for p in out.rglob("*") if p.is_file()]
    assert sorted(p.relative_to(out).name for p in files) == sorted(
        [rows.name, "part-9-logs.zip", "part-9-summary.txt"]
    )
    with zipfile.ZipFile(out / "part-9-logs.zip") as logs:
        assert logs.read("1-fails.txt") == b"why\n"
        assert len(logs.read("3-writes.txt")) > 100_000
    summary = (out / "part-9-summary.txt").read_text()
    assert [line.split(":")[0] for line in summary.splitlines()] == list(outcomes)


def test_no_step_starts_without_time_left(tmp_path: Path) -> None:
    steps = [first_run.Step("late", 60, [sys.executable, "-c", ""])]
    assert first_run.run_part(steps, tmp_path / "part", None, seconds=1) == {
        "late": "skipped: no time left"
    }


# A program with one step, which starts a process in its own session; both write their process id.
ORPHANS = """
import subprocess, sys
from bench import first_run, processes
from pathlib import Path
child = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()} {os.getsid(0)}'); " \
    "time.sleep(300)"
step = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, 'FOLDER/b'], " \
    f"start_new_session=True); sys.argv[1:] = ['FOLDER/a']; exec({child!r})"
processes.adopt_orphans()
first_run.signal.signal(first_run.signal.SIGTERM, first_run.interrupt)
steps = [first_run.Step("hangs", SECONDS, [sys.executable, "-c", step])]
first_run.run_part(steps, Path("FOLDER/part"), None, seconds=400)
"""


@pytest.mark.parametrize(
    ("ended_by", "seconds"), [("its limit", 15), ("SIGTERM", 300), ("SIGKILL", 300)]
)
def test_no_process_outlives_its_part(tmp_path: Path, ended_by: str, seconds: int) -> None:
    """A process that started its own session ends too, unless the program itself is killed."""
    code = ORPHANS.replace("FOLDER", str(tmp_path)).replace("SECONDS", str(seconds))
    program = subprocess.Popen(
        [sys.executable, "-c", code], cwd=first_run.ROOT, start_new_session=True
    )
    files = [tmp_path / name for name in "ab"]
    wait_until(lambda: all(f.exists() and f.read_text() for f in files), "both processes")
    (step, session), (child, _) = (map(int, (tmp_path / n).read_text().split()) for n in "ab")
    assert session == program.pid, "the step left the session of the program"
    if ended_by != "its limit":
        program.send_signal(getattr(signal, ended_by))
    program.wait(timeout=30)
    wait_until(lambda: not alive(step), "the end of the step")
    if ended_by == "SIGKILL":
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: not alive(child), "the end of its child")


def test_tools_are_found_in_the_folders_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("2025.1", "2025.3"):
        tool = tmp_path / "nsight-compute" / version / "some-profiler"
        tool.parent.mkdir(parents=True)
        tool.write_text("")
        tool.chmod(0o755)
    monkeypatch.setattr(first_run, "TOOL_FOLDERS", (f"{tmp_path}/nsight-compute/*",))
    assert first_run.find_tool("some-profiler") == str(tool)
    assert first_run.find_tool("another-profiler") is None


def test_tests_that_hang_or_exit_the_process_do_not_stop_the_run(tmp_path: Path) -> None:
    """Each test has a time limit, without an extra pytest plugin, even if pytest is configured to
    use the same timer.
    """
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfaulthandler_timeout = 300\n")
    code = f"""
from bench import watchdog
import json
outcome = watchdog.run(["-q", {str(file)!r}, "--rootdir", {str(tmp_path)!r}], limit=3, seconds=120)
names = [[name.split("::")[1] for name in part] for part in outcome[:4]]
print(json.dumps([*names, *outcome[4:]]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=first_run.ROOT,
        env=environment(),
        check=True,
    )
    assert json.loads(result.stdout.splitlines()[-1]) == [
        ["test_passes", "test_comes_last"],
        ["test_fails"],
        ["test_is_skipped"],
        ["test_hangs", "test_ends_the_process"],
        False,
        ["not here"],
    ]


def test_skipped_tests_are_not_reported_as_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = watchdog.Outcome([], [], ["a::b"], [], incomplete=False, reasons=["no nvcc"])
    monkeypatch.setattr(watchdog, "run", lambda *_: skipped)
    with pytest.raises(SystemExit) as error:
        watchdog.main(["--limit", "1", "--seconds", "1"])
    assert error.value.code == settings.SKIPPED
    assert capsys.readouterr().out.splitlines()[-1] == "skipped: no nvcc"


def test_a_run_out_of_time_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_session", lambda *_: [{"began": "a::b"}])
    outcome = watchdog.run([], limit=1, seconds=0)
    assert outcome.hung == ["a::b"]
    assert outcome.incomplete


@pytest.mark.full(reason="traces the linear loss in another process")
def test_dry_run_of_a_part(tmp_path: Path) -> None:
    """The last part needs tools that are missing here, and traces the linear loss."""
    result = subprocess.run(
        [*FIRST_RUN, "--part", "3", "--dry-run"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=first_run.ROOT,
        env=environment(OUT=str(tmp_path), PATH="/usr/bin:/bin", CUDA_HOME="/nonexistent"),
        check=False,
    )
    assert result.returncode == 0, result.stdout
    lines = (tmp_path / "part-3-summary.txt").read_text().splitlines()
    assert len(lines) == len(first_run.PARTS[3])
    assert "trace, 7B: done" in "\n".join(lines)
