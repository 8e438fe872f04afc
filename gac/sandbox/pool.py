"""Runs a bounded number of programs concurrently on a fork server.

A `Server` is one fork server, started inside bubblewrap if possible. It has a worker for every
program that runs at the same time. A request and its result are messages on the connection to a
worker, which closes if the server dies. A `Pool` is thread-safe and survives the server's death.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import marshal
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .row import JudgeSpec, Program, RowError, compile_row

__all__ = ["LAYERS", "JudgeSpec", "Layers", "Pool", "Program", "RunResult", "SandboxError"]

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # loading numpy on a busy machine
STOP_SECONDS = 5.0
WALL_PER_CPU_SECOND = 4  # wall-clock limit per CPU second, excluding time spent waiting for a core
# hard wall-clock limit as a multiple of the above, for a program starved of CPU
STARVATION_FACTOR = 10
WALL_MARGIN = 30.0  # seconds beyond the server's own wall-clock limit
ATTEMPTS = 3  # per program, if the server dies or a process cannot be started
PAUSE_SECONDS = 0.2
MESSAGE_BYTES = 1 << 16  # more than any request or answer has
# the kernel enforces the limit in whole ticks, so the measured CPU time can be lower
CPU_LIMIT_TOLERANCE = 0.5

Ending = Literal["ended", "timeout", "stalled", "crash"]

# The server loads this folder as a standalone package, because importing `gac` would load torch.
START = """
import gc, os, sys
gc.disable()  # until `zygote.main` enables it
# what modules do after a fork takes time, and `random` would reseed itself
os.register_at_fork = lambda **functions: None
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
    "LD_BIND_NOW": "1",  # once, instead of in every child
    "MALLOC_ARENA_MAX": "1",  # otherwise every thread reserves 64 MiB of address space
}
_BWRAP = """
    --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try
    --as-pid-1 --proc /proc --dev /dev
"""
_BWRAP_AS_ROOT = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID --cap-add CAP_KILL"
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
        return "; ".join(
            [
                f"sandbox: {shown}",
                *[f"no {name}: {reason}" for name, reason in self.missing.items()],
            ]
        )


class Server:
    """One fork server.

    Args:
        preload: packages that programs may import in addition to the standard library.
        namespaces: bubblewrap command line to start the server with; None: start it directly.

    Raises:
        SandboxError: the server failed to start; the message says why.
    """

    def __init__(self, preload: Sequence[str], *, namespaces: Sequence[str] | None) -> None:
        self._idle: list[socket.socket] = []  # connections to workers
        self.died = False
        """Whether it must be replaced."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        user = os.pidfd_open(os.getpid())
        errors = os.memfd_create("errors")
        options = {
            "control": theirs.fileno(),
            "user": user,
            "preload": list(preload),
            "path": _search_path(preload),
            "layers": {"limits": "limits", **({"namespaces": "namespaces"} if namespaces else {})},
        }
        command = [*(namespaces or []), sys.executable, "-s", "-P", "-S", "-c", START]
        with theirs, os.fdopen(user, "rb"), os.fdopen(errors, "rb"):
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

    def _greet(self, errors: int) -> Layers:
        self._control.settimeout(START_SECONDS)
        try:
            greeting = self._control.recv(MESSAGE_BYTES)
        except OSError:  # no answer in time, or it died
            greeting = b""
        if greeting:
            return Layers(**json.loads(greeting))
        self.stop()
        lines = os.pread(errors, MESSAGE_BYTES, 0).decode(errors="replace").split("\n")
        raise SandboxError(next((line for line in reversed(lines) if line.strip()), "no error"))

    def ask(self, request: Mapping[str, Any], files: Sequence[int]) -> dict[str, Any]:
        """Send a request and return its result (see `zygote`)."""
        wall = WALL_PER_CPU_SECOND * request["cpu_seconds"]
        most = STARVATION_FACTOR * wall
        with contextlib.suppress(OSError):  # no answer in time, or the server is gone
            worker = self._worker()
            worker.settimeout(most + WALL_MARGIN)
            socket.send_fds(
                worker,
                [json.dumps({**request, "wall_seconds": wall, "most_seconds": most}).encode()],
                files,
            )
            if answer := worker.recv(MESSAGE_BYTES):
                self._idle.append(worker)
                return json.loads(answer)
        self.died = True
        return {"failed": "the fork server died"}

    def _worker(self) -> socket.socket:
        """A connection to an idle worker, or to a new one."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [b"work"], [theirs.fileno()])
        return ours

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
        for worker in self._idle:
            worker.close()


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
            return Server(preload, namespaces=[str(bwrap), *arguments])
        except SandboxError as error:
            problem = str(error)
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
    shared = _BWRAP.split()
    needed = [
        *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache"),
        *(sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix),
        *(str(_PACKAGE), *_search_path(preload)),
    ]
    for path in dict.fromkeys(filter(None, needed)):
        shared += ["--ro-bind-try", path, path]
    attempts = [["--unshare-user", *shared]]
    return [[*_BWRAP_AS_ROOT.split(), *shared], *attempts] if os.getuid() == 0 else attempts


@dataclass(frozen=True)
class RunResult:
    """Result of running a program."""

    ending: Ending
    """"ended": it exited by itself; "timeout": it exceeded the CPU limit; "stalled": it exceeded
    the wall-clock limit, 4 times that; "crash": a signal killed it.
    """
    passed: tuple[bool, ...] = ()
    """One per test; all False if the judge did not finish."""
    problem: str = ""
    """Description of the first failure; may contain text from the program."""
    row_problem: str = ""
    """What is wrong with the tests themselves, independently of the program."""
    stdout: bytes = b""
    """Standard output of a script."""
    status: int = 0
    """Exit status of a script."""


class Pool:
    """Runs model-written programs in confined processes.

    Args:
        workers: number of programs that `map` runs at the same time.
        preload: packages that programs may import in addition to the standard library.
        require: protection layers that must be available (see `LAYERS`).
    """

    def __init__(
        self,
        *,
        workers: int,
        preload: Sequence[str] = (),
        require: Sequence[str] = (),
    ) -> None:
        unknown = [name for name in require if name not in LAYERS]
        if unknown:
            raise ValueError(f"require must be among {', '.join(LAYERS)}; got {', '.join(unknown)}")
        self.workers, self.preload, self.require = workers, tuple(preload), tuple(require)
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Create fresh state; a fork of this process gets its own too."""
        self._lock = threading.RLock()
        self._server: Server | None = None

    def start(self) -> Layers:
        """Start the fork server if needed and return its protection layers.

        Raises:
            SandboxError: a required protection layer is unavailable.
        """
        return self._current().layers

    def check(
        self, program: Program, tests: JudgeSpec, cpu_seconds: int, memory_mb: int
    ) -> RunResult:
        """Run `tests` against `program`.

        Raises:
            SandboxError: no program can be run.
        """
        try:
            row = compile_row(tests)
        except RowError as error:
            return RunResult("ended", row_problem=str(error))
        ends, written = self._ask("check", program, row, cpu_seconds, memory_mb, 1 << 24)
        failed = (False,) * len(tests.tests)
        ending = _ending(ends, cpu_seconds)
        try:
            verdict: dict[str, Any] = json.loads(written)
        except ValueError:  # the judge exited before writing its verdict
            return RunResult("crash" if ending == "ended" else ending, failed)
        return RunResult(ending, tuple(verdict.pop("passed", ())), **verdict)

    def run(
        self, program: Program, stdin: bytes, cpu_seconds: int, memory_mb: int, output_bytes: int
    ) -> RunResult:
        """Run `program` as a script and read at most `output_bytes` of its standard output.

        Raises:
            SandboxError: no program can be run.
        """
        ends, stdout = self._ask("script", program, stdin, cpu_seconds, memory_mb, output_bytes)
        return RunResult(
            _ending(ends, cpu_seconds),
            stdout=stdout,
            status=os.waitstatus_to_exitcode(ends["ends"][0][0]),
        )

    def map(self, function: Any, items: Sequence[Any]) -> list[Any]:
        """Apply `function` to every item, at most `workers` at a time."""
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(function, items))

    def close(self) -> None:
        """Stop all processes; the next use starts new ones."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    # ---------------------------------------------------------------------------------------------

    def _current(self) -> Server:
        with self._lock:
            if self._server is not None and self._server.died:
                logger.warning("the sandbox's fork server died unexpectedly; restarting it")
                self.close()
            if self._server is None:
                self._server = self._start()
            return self._server

    def _start(self) -> Server:
        try:
            started = start(self.preload)
        except (SandboxError, OSError) as error:
            raise SandboxError(f"model-written code cannot be run safely here: {error}") from error
        missing_layers = [name for name in self.require if name not in started.layers.active]
        if missing_layers:
            started.stop()
            reasons = "; ".join(
                f"no {name}: {started.layers.missing[name]}" for name in missing_layers
            )
            raise SandboxError(
                f"refusing to run model-written code: required layers are unavailable ({reasons})"
            )
        logger.log(
            logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG,
            "%s",
            started.layers,
        )
        return started

    def _ask(
        self,
        kind: str,
        program: Program,
        given: bytes,
        cpu_seconds: int,
        memory_mb: int,
        output_bytes: int,
    ) -> tuple[dict[str, Any], bytes]:
        """Run a program; return how its processes ended and what they wrote."""
        processes = 2 if kind == "check" else 1
        request = {"kind": kind, "cpu_seconds": cpu_seconds, "memory_bytes": memory_mb << 20}
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE_SECONDS * attempt**2)
            current = self._current()
            with _files(program, given) as files:
                ends = current.ask(request, files)
                # we share the offset of a file with its reader
                if (
                    all(os.lseek(file, 0, os.SEEK_CUR) for file in files[:processes])
                    and "failed" not in ends
                ):
                    return ends, os.pread(files[2], output_bytes, 0)
                problem = ends.get("failed", f"a process exited before reading its input ({ends})")
        raise SandboxError(f"the sandbox gave up after {ATTEMPTS} attempts: {problem}")


@contextlib.contextmanager
def _files(program: Program, given: bytes) -> Iterator[list[int]]:
    """Memory files: the program, what its judge or it reads, and an empty one for results."""
    files: list[int] = []
    try:
        for content in (marshal.dumps(vars(program)), given, b""):
            files.append(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.pwrite(files[-1], content, 0)  # leaves the file offset at the start
        for file in files[:2]:  # a program could write to its input, beyond its memory limit
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
        yield files
    except OSError as error:
        raise SandboxError(
            f"cannot create an in-memory file for a program: {error.strerror}"
        ) from error
    finally:
        for file in files:
            os.close(file)


def _ending(ends: Mapping[str, Any], cpu_seconds: int) -> Ending:
    if ends["stalled"]:
        return "stalled"
    killed = [(os.WTERMSIG(s), seconds) for s, seconds in ends["ends"] if os.WIFSIGNALED(s)]
    if any(n == signal.SIGKILL and s >= cpu_seconds * CPU_LIMIT_TOLERANCE for n, s in killed):
        return "timeout"
    return "crash" if killed else "ended"
