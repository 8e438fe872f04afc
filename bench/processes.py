"""Runs a command with a time limit and leaves no process behind, on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None)
GRACE = 10  # seconds to wait for a killed process: one that hangs in a driver may never end


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants, so that `run_limited` can end them.

    They may have left the command's process group. Called once by a program's main function.
    """
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_limited(
    command: Sequence[str],
    seconds: float,
    cwd: Path,
    environment: Mapping[str, str],
    output: IO[str] | None = None,
) -> int | None:
    """Run a command and return its exit code, or None if it exceeds the limit.

    Its whole process group is killed in the end, also if this function is interrupted. The group
    stays in the caller's session: whoever ends the session ends the command too. If the caller is
    killed, so is the command.
    """
    before = children()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        process_group=0,
        preexec_fn=_end_with_parent,
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)
        _end_orphans(before | {process.pid})


def children() -> set[int]:
    """The processes whose parent is this one."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def _end_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_orphans(before: set[int]) -> None:
    """Kill children not in `before`; repeat, because we inherit the children of killed ones."""
    for _ in range(GRACE):
        orphans = children() - before
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
