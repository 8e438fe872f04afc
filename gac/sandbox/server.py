"""The trainer's handle of one fork server: starts it, inside bubblewrap if that works, and asks it.

A request is one message of a socket that keeps message borders, so threads need no lock; its
outcome comes over a pipe of its own, whose end of file tells that the server died.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 60.0  # loading numpy on a busy machine
STOP_SECONDS = 5.0
WALL_PER_CPU_SECOND = 4  # a program that waits, not for a core
STARVED = 10  # times that by the clock, where others have the cores
WALL_MARGIN = 30.0  # after the server's own wall limit

# The server is this folder as a package of its own: importing `gac` would load torch.
START = """
import sys
sys.path.append(sys.argv[1])
from sandbox.zygote import main
sys.path.remove(sys.argv[1])
import json
main(json.loads(sys.argv[2]))
"""
_PACKAGE = Path(__file__).parent
LAYERS = ("limits", "seccomp", "landlock", "uid", "namespaces")
"""What `require` may name; limits and seccomp are always required."""


class SandboxError(RuntimeError):
    """Programs cannot be run; the message says what is missing. Never a program's own fault."""


@dataclass(frozen=True)
class Layers:
    """What protects this machine from the programs."""

    active: Mapping[str, str]
    """Name in `LAYERS` -> how it shows in the log."""
    missing: Mapping[str, str]
    """Name -> why it is not there."""

    def __str__(self) -> str:
        shown = ", ".join(self.active[name] for name in LAYERS if name in self.active)
        lacks = [f"no {name}: {reason}" for name, reason in self.missing.items()]
        return "; ".join([f"sandbox: {shown}", *lacks])


class Server:
    """One fork server.

    Args:
        preload: packages that programs may import beside the standard library.
        namespaces: start it inside bubblewrap.

    Raises:
        SandboxError: it does not start; the message says why.
    """

    def __init__(self, preload: Sequence[str], *, namespaces: Sequence[str] | None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        user = os.pidfd_open(os.getpid())
        errors = os.memfd_create("errors")
        options = {"control": theirs.fileno(), "user": user, "preload": list(preload)}
        options["path"] = _search_path(preload)
        command = [*(namespaces or []), sys.executable, "-s", "-P", "-S", "-c", START]
        self._control = ours
        try:
            self._process = subprocess.Popen(
                [*command, str(_PACKAGE.parent), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno(), user],
                # sets come in the same order in every run; preloaded packages start no threads
                env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the trainer
            )
            theirs.close()  # so that the server's end is the end of our file
            self.layers = self._greet(errors)
            self._death = os.pidfd_open(self._process.pid)
        except BaseException:  # an interrupt too must not leave a server
            ours.close()  # a server that still runs ends on that
            raise
        finally:
            theirs.close()
            os.close(user)
            os.close(errors)

    def _greet(self, errors: int) -> Layers:
        self._control.settimeout(START_SECONDS)
        try:
            greeting = self._control.recv(1 << 16)
        except OSError:  # no answer in time, or it died
            greeting = b""
        self._control.settimeout(None)
        if not greeting:
            self._process.kill()
        found: dict[str, Any] = json.loads(greeting) if greeting else {"refused": None}
        if "refused" not in found:
            active = {"limits": "limits", **found["layers"]}
            return Layers(active, found["missing"])
        self._process.wait()
        lines = os.pread(errors, 1 << 16, 0).decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it says nothing")
        raise SandboxError(found["refused"] or last)

    def ask(self, request: Mapping[str, Any], files: Sequence[int]) -> dict[str, Any] | None:
        """The outcome of one request (see `zygote`), or None if the server died over it."""
        reader, writer = os.pipe()
        try:
            try:
                wall = WALL_PER_CPU_SECOND * request["cpu_seconds"]
                limits = {"wall_seconds": wall, "most_seconds": STARVED * wall}
                message = json.dumps({**request, **limits}).encode()
                socket.send_fds(self._control, [message], [writer, *files])
            except OSError:  # it is gone, or another thread saw that first and closed the socket
                return None
            finally:
                os.close(writer)
            return self._wait(reader, STARVED * wall + WALL_MARGIN)
        finally:
            os.close(reader)

    def _wait(self, reader: int, seconds: float) -> dict[str, Any] | None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        poll.register(self._death, select.POLLIN)  # a fork of this process may hold the pipe open
        ready = [number for number, _ in poll.poll(seconds * 1000)]
        if reader not in ready:
            return None
        data = os.read(reader, 1 << 16)
        return json.loads(data) if data else None

    def stop(self) -> None:
        """End the server; its programs end with it."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # also where a fork holds the socket open
        self._control.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._death)


def start(preload: Sequence[str]) -> Server:
    """A server with as many layers as work here.

    Raises:
        SandboxError: the required ones do not.
    """
    if sys.platform != "linux":
        raise SandboxError(f"it needs Linux, this is {sys.platform}")
    bwrap = shutil.which("bwrap")
    problem = "bwrap not installed"
    for arguments in _namespace_attempts(preload) if bwrap else ():
        try:
            server = Server(preload, namespaces=[str(bwrap), *arguments])
        except SandboxError as error:
            problem = str(error)
            continue
        server.layers = Layers({**server.layers.active, "namespaces": "namespaces"},
                               server.layers.missing)  # fmt: skip
        return server
    server = Server(preload, namespaces=None)
    server.layers = Layers(server.layers.active, {**server.layers.missing, "namespaces": problem})
    return server


def _search_path(preload: Sequence[str]) -> list[str]:
    """Where packages are found by this process."""
    return [str(Path(entry).resolve()) for entry in sys.path] if preload else []


def _namespace_attempts(preload: Sequence[str]) -> list[list[str]]:
    """Arguments of bwrap, the better ones first: root that may change its uid inside, then any."""
    shared = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
              "--unshare-cgroup-try", "--as-pid-1", "--proc", "/proc", "--dev", "/dev"]  # fmt: skip
    needed = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache"]
    needed += [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    needed += [str(_PACKAGE), *_search_path(preload)]
    for path in dict.fromkeys(entry for entry in needed if entry):
        shared += ["--ro-bind-try", path, path]
    as_root = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    attempts = [["--unshare-user", *shared]]
    return [[*as_root, *shared], *attempts] if os.getuid() == 0 else attempts
