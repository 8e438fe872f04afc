"""One process at a time in a run directory; the lock of a killed process does not persist."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

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
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait(timeout=60)


def test_a_second_process_is_refused_until_the_first_is_killed(holder, tmp_path):
    with pytest.raises(RunDirectoryError, match=f"{holder.pid} on host {socket.gethostname()}"):
        run_lock(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=60)
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()


@pytest.mark.parametrize("command", ["train", "eval", "export"])
def test_commands_report_a_locked_folder_in_one_line(holder, tmp_path, capsys, command):
    run = tmp_path / "config.yaml"
    run.write_text("reward: exact")
    arguments = {
        "train": ["train", str(run), "--set", f"out={tmp_path}", "data.prompts=x"],
        "eval": ["eval", "--set", f"out={tmp_path}", "model.path=x", "tasks.a.data.prompts=x"],
        "export": ["export", str(tmp_path), str(tmp_path / "model")],
    }
    assert main(arguments[command]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(tmp_path) in lines[0]
    assert str(holder.pid) in lines[0]
