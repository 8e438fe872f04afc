"""Client for one fork server: starts it, inside bubblewrap if possible, and sends it requests.

Each request is one message on a socket that preserves message boundaries, so threads need no lock.
Its result arrives on a separate pipe; end of file there means that the server died.
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
WALL_PER_CPU_SECOND = 4  # wall-clock limit per CPU second, excluding time spent waiting for a core
STARVATION_FACTOR = (
    10  # hard wall-clock limit as a multiple of the above, for a program starved of CPU
)
WALL_MARGIN = 30.0  # seconds beyond the server's own wall-clock limit

# The server loads this folder as a standalone package, because importing `gac` would load torch.
START = """
import gc, sys
gc.disable()  # until `zygote.main` enables it
sys.modules["ssl"] = None  # asyncio works without it, and it is large
sys.path.append(sys.argv[1])
from sandbox.zygote import main
sys.path.remove(sys.argv[1])
del sys.modules["ssl"]
import json
main(json.loads(sys.argv[2]))
"""
_PACKAGE = Path(__file__).parent
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the same set order in every run
    "OMP_NUM_THREADS": "1",  # no threads in preloaded packages
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # otherwise every thread reserves 64 MiB of address space
}
LAYERS = ("limits", "seccomp", "landlock", "uid", "namespaces")
"""Valid names for `require`; limits and seccomp are always required."""


class SandboxError(RuntimeError):
    """Programs cannot be run; the message says why. A program never causes this error."""


@dataclass(frozen=True)
class Layers:
    """The layers that protect this machine from the programs."""

    active: dict[str, str]
    """Layer name -> description for the log."""
    missing: dict[str, str]
    """Layer name -> why it is unavailable."""

    def __str__(self) -> str:
        shown = ", ".join(self.active[name] for name in LAYERS if name in self.active)
        lacks = [f"no {name}: {reason}" for name, reason in self.missing.items()]
        return "; ".join([f"sandbox: {shown}", *lacks])


class Server:
    """One fork server.

    Args:
        preload: packages that programs may import in addition to the standard library.
        namespaces: bubblewrap command line to start the server with; None: start it directly.

    Raises:
        SandboxError: the server failed to start; the message says why.
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
                env=_ENVIRONMENT,
                start_new_session=True,  # only the trainer should receive Ctrl-C
            )
            theirs.close()  # so that we see end of file when the server exits
            self.layers = self._greet(errors)
            self._death = os.pidfd_open(self._process.pid)
        except BaseException:  # including KeyboardInterrupt: do not leave a server behind
            ours.close()  # a running server exits when this closes
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
        report: dict[str, Any] = json.loads(greeting) if greeting else {"refused": None}
        if "refused" not in report:
            return Layers({"limits": "limits", **report["layers"]}, report["missing"])
        self._process.wait()
        lines = os.pread(errors, 1 << 16, 0).decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no error output")
        raise SandboxError(report["refused"] or last)

    def ask(self, request: Mapping[str, Any], files: Sequence[int]) -> dict[str, Any] | None:
        """Send a request and return its result (see `zygote`), or None if the server died."""
        reader, writer = os.pipe()
        try:
            wall = WALL_PER_CPU_SECOND * request["cpu_seconds"]
            limits = {"wall_seconds": wall, "most_seconds": STARVATION_FACTOR * wall}
            try:
                message = json.dumps({**request, **limits}).encode()
                socket.send_fds(self._control, [message], [writer, *files])
            except OSError:  # the server is gone; another thread may have closed the socket
                return None
            finally:
                os.close(writer)
            return self._wait(reader, STARVATION_FACTOR * wall + WALL_MARGIN)
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
        """Stop the server and all its programs."""
        with contextlib.suppress(OSError):
            # works even if a forked child holds the socket open
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._death)


def start(preload: Sequence[str]) -> Server:
    """Start a server with as many protection layers as this machine supports.

    Raises:
        SandboxError: a required layer is unavailable.
    """
    if sys.platform != "linux":
        raise SandboxError(f"requires Linux, but this is {sys.platform}")
    bwrap = shutil.which("bwrap")
    problem = "bwrap is not installed"
    for arguments in _namespace_attempts(preload) if bwrap else ():
        try:
            server = Server(preload, namespaces=[str(bwrap), *arguments])
        except SandboxError as error:
            problem = str(error)
        else:
            server.layers.active["namespaces"] = "namespaces"
            return server
    server = Server(preload, namespaces=None)
    server.layers.missing["namespaces"] = problem
    return server


def _search_path(preload: Sequence[str]) -> list[str]:
    """This process's import path, if there are packages to preload."""
    return [str(Path(entry).resolve()) for entry in sys.path] if preload else []


def _namespace_attempts(preload: Sequence[str]) -> list[list[str]]:
    """bwrap arguments to try, best first.

    First as root with the right to change uid inside, then as any user.
    """
    shared = [
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--as-pid-1",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    needed = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache"]
    needed += [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    needed += [str(_PACKAGE), *_search_path(preload)]
    for path in dict.fromkeys(entry for entry in needed if entry):
        shared += ["--ro-bind-try", path, path]
    as_root = ["--cap-drop", "ALL"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
        as_root += ["--cap-add", capability]
    attempts = [["--unshare-user", *shared]]
    return [[*as_root, *shared], *attempts] if os.getuid() == 0 else attempts
