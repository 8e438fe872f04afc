"""Verifies the confinement before any program runs: a confined child attempts forbidden calls."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

_PROBE_SECONDS = 5
_PROBE_MEMORY = 1 << 28
# Neither Landlock nor the uid forbids any of these, so each refusal comes from seccomp.
_ATTEMPTS: dict[str, Callable[[], object]] = {
    "stat": lambda: os.stat("/"),  # noqa: PTH116 - the syscall itself is under test
    "pipe": os.pipe,
    "fork": lambda: os.waitpid(os.fork() or os._exit(0), 0),
    "socketpair": socket.socketpair,
    "memfd_create": lambda: os.memfd_create("probe"),
    "kill": lambda: os.kill(os.getpid(), 0),
    "fcntl(F_SETOWN)": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid()),
    "uname": os.uname,
    "getcwd": os.getcwd,
}
_MIN_WORKING = 5  # attempts that must succeed unconfined; an outer sandbox may refuse some


def verify_confinement(
    fork: Callable[[Callable[[], int]], int], confine: Callable[[Sequence[int], int, int], None]
) -> None:
    """Check that forbidden calls fail in a confined child, and work in one that is not confined.

    Args:
        fork: starts a child that runs a function and exits with its return value; returns the pid.
        confine: confines the child; takes the descriptors to keep, CPU seconds and bytes of memory.

    Raises:
        OSError: a forbidden call succeeded, or the probe was inconclusive; the message says which.
    """
    possible = [name for name, outcome in _outcomes(fork, None).items() if outcome == "done"]
    if len(possible) < _MIN_WORKING:
        names = ", ".join(possible) or "none"
        raise OSError(
            errno.EPERM,
            f"the probe is inconclusive: without any confinement, only these calls work: {names}",
        )
    outcomes = _outcomes(fork, confine)
    allowed = [name for name in possible if outcomes[name] != "EPERM"]
    if allowed:
        raise OSError(errno.EPERM, f"the seccomp filter does not block {', '.join(allowed)}")


def _outcomes(fork: Callable[[Callable[[], int]], int], confine: Any) -> dict[str, str]:
    """The outcome of each attempt in a child."""
    reader, writer = os.pipe()

    def body() -> int:
        try:
            if confine:
                confine([writer], _PROBE_SECONDS, _PROBE_MEMORY)
            found: Any = {name: _outcome(attempt) for name, attempt in _ATTEMPTS.items()}
        except OSError as error:
            found = str(error)
        return os.write(writer, json.dumps(found).encode()) and 0

    pid = fork(body)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    outcomes = json.loads(answer) if answer else f"wait status {status}"
    if isinstance(outcomes, str):
        raise OSError(errno.EPERM, f"a confined process cannot run here ({outcomes})")
    return outcomes


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"
