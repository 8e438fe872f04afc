"""Verifies the confinement before any program runs: a confined child attempts forbidden calls."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Sequence

_PROBE_SECONDS = 5
_PROBE_MEMORY = 1 << 28


def _fork() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def _make_pipe() -> None:
    for end in os.pipe():
        os.close(end)


def _exchange_descriptors() -> None:
    for end in socket.socketpair():
        end.close()


def _make_memory_file() -> None:
    os.close(os.memfd_create("probe"))


def _own_signal() -> None:
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())


# Neither Landlock nor the uid forbids any of these, so each refusal comes from seccomp.
_ATTEMPTS: dict[str, Callable[[], object]] = {
    "stat": lambda: os.stat("/"),  # noqa: PTH116 - the syscall itself is under test
    "pipe": _make_pipe,
    "fork": _fork,
    "socketpair": _exchange_descriptors,
    "memfd_create": _make_memory_file,
    "kill": lambda: os.kill(os.getpid(), 0),
    "fcntl(F_SETOWN)": _own_signal,
    "uname": os.uname,
    "getcwd": os.getcwd,
}
_MIN_WORKING = 5  # attempts that must succeed unconfined; an outer sandbox may refuse some


def verify_confinement(
    fork: Callable[[Callable[[], int]], int], confine: Callable[[Sequence[int], int, int], None]
) -> None:
    """Fork a child, confine it fully and check that its forbidden calls fail.

    Args:
        fork: starts a child that runs a function and exits with its return value; returns the pid.
        confine: confines the child; takes the descriptors to keep, CPU seconds and bytes of memory.

    Raises:
        OSError: a forbidden call succeeded, or the probe was inconclusive; the message says which.
    """
    possible = [name for name, attempt in _ATTEMPTS.items() if _outcome(attempt) == "done"]
    if len(possible) < _MIN_WORKING:
        names = ", ".join(possible) or "none"
        raise OSError(
            errno.EPERM,
            f"the probe is inconclusive: without any confinement, only these calls work: {names}",
        )
    reader, writer = os.pipe()

    def body() -> int:
        try:
            confine([writer], _PROBE_SECONDS, _PROBE_MEMORY)
        except OSError as error:
            os.write(writer, json.dumps(str(error)).encode())
            return 1
        found = {name: _outcome(_ATTEMPTS[name]) for name in possible}
        os.write(writer, json.dumps(found).encode())
        return 0

    pid = fork(body)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    outcomes = json.loads(answer) if answer else f"wait status {status}"
    if isinstance(outcomes, str):
        raise OSError(errno.EPERM, f"a confined process cannot run here ({outcomes})")
    allowed = [name for name, outcome in outcomes.items() if outcome != "EPERM"]
    if allowed:
        raise OSError(errno.EPERM, f"the seccomp filter does not block {', '.join(allowed)}")


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"
