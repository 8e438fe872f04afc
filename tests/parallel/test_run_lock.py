"""One process at a time in a run directory; the lock of a killed process does not persist."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from gac.cli import main
from gac.errors import RunDirectoryError
from gac.parallel.run_lock import LOCK_FILE, run_lock

HOLD = """
import pathlib, signal, sys
from gac.parallel.run_lock import run_lock
with run_lock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    signal.pause()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait(timeout=60)


def test_a_second_process_is_refused_until_the_first_is_killed(holder, tmp_path):
    with pytest.raises(RunDirectoryError, match=f"{holder.pid} on host {socket.gethostname()}"):
        run_lock(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=60)
    with run_lock(tmp_path), run_lock(tmp_path / "new" / "run"):
        assert [json.loads(file.read_text())["process"] for file in tmp_path.rglob(LOCK_FILE)] == [
            os.getpid()
        ] * 2


@pytest.mark.parametrize("command", ["train", "eval", "export"])
def test_commands_report_a_locked_folder_in_one_line(holder, tmp_path, capsys, command):
    run = tmp_path / "config.yaml"
    run.write_text("{method: grpo, reward: exact, model: {path: x, random_init: true}}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n')
    arguments = {
        "train": ["train", str(run), "--set", f"out={tmp_path}", f"data.prompts={rows}"],
        "eval": [
            "eval",
            "--set",
            f"out={tmp_path}",
            "model.path=x",
            f"tasks.a.data.prompts={rows}",
        ],
        "export": ["export", str(tmp_path), str(tmp_path / "model")],
    }
    assert main(arguments[command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
    assert str(holder.pid) in line


def test_a_lock_names_its_holder_also_over_an_earlier_longer_name(tmp_path):
    path = tmp_path / "runs" / LOCK_FILE
    for text in ("", "x" * 999):
        if text:
            path.write_text(text)
        with run_lock(path.parent):
            assert json.loads(path.read_text()) == {
                "host": socket.gethostname(),
                "process": os.getpid(),
            }
            with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()} on host"):
                run_lock(path.parent).__enter__()


@pytest.mark.parametrize("text", ["", "{", "{}", "3"])
def test_a_holder_that_has_not_written_its_name(tmp_path, monkeypatch, text):
    path = tmp_path / LOCK_FILE
    path.write_text(text)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match="in use by another process; wait until it"):
            run_lock(tmp_path).__enter__()
        monkeypatch.setenv("RANK", "1")
        with run_lock(tmp_path):  # rank 0 holds it for the job
            pass


def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    with run_lock(tmp_path / "file" / "run"):  # the command reports it
        pass
    mask = os.umask(0o002)  # as on a shared file system
    try:
        with run_lock(tmp_path):
            assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(mask)

    numbers = iter([errno.EIO, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP])

    def flock(*_: Any) -> None:
        raise OSError(next(numbers), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="no locks"):
        run_lock(tmp_path).__enter__()
    for _ in range(4):
        caplog.clear()
        with run_lock(tmp_path):
            assert "does not support locks" in caplog.text
