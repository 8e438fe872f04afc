"""Runs a bounded number of programs concurrently on a fork server.

Thread-safe; survives the server's death.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import server
from .row import JudgeSpec, Program, RowError, compile_row
from .server import LAYERS, Layers, SandboxError, Server

__all__ = ["LAYERS", "JudgeSpec", "Layers", "Pool", "Program", "RunResult", "SandboxError"]

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # per program, if the server dies or a process cannot be started
PAUSE_SECONDS = 0.2
# the kernel enforces the limit in whole ticks, so the measured CPU time can be lower
CPU_LIMIT_TOLERANCE = 0.5

Ending = Literal["ended", "timeout", "stalled", "crash"]


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

    Fewer than `workers` run at a time if their memory limits together would exceed half of the
    memory of the machine, divided by the ranks on it.

    Args:
        workers: number of programs run concurrently; None: available cores divided by the ranks on
            this machine.
        preload: packages that programs may import in addition to the standard library.
        require: protection layers that must be available (see `LAYERS`).
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        preload: Sequence[str] = (),
        require: Sequence[str] = (),
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        unknown = [name for name in require if name not in LAYERS]
        if unknown:
            raise ValueError(f"require must be among {', '.join(LAYERS)}; got {', '.join(unknown)}")
        self.workers = workers or default_workers()
        self.preload, self.require = tuple(preload), tuple(require)
        self._memory = _MemoryBudget(_memory_bytes() // 2 // _ranks())
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

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
        with _files(program, row) as files:
            ends = self._ask("check", files, cpu_seconds, memory_mb)
            written = os.pread(files[2], 1 << 24, 0)
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
        with _files(program, stdin) as files:
            ends = self._ask("script", files, cpu_seconds, memory_mb)
            stdout = os.pread(files[2], output_bytes, 0)
        status = os.waitstatus_to_exitcode(ends["ends"][0][0])
        return RunResult(_ending(ends, cpu_seconds), stdout=stdout, status=status)

    def map(self, function: Any, items: Sequence[Any]) -> list[Any]:
        """Apply `function` to every item, at most `workers` at a time."""
        return list(self._threads.map(function, items))

    def close(self) -> None:
        """Stop all processes; the next use starts new ones."""
        with self._lock:
            threads, server_ = self._threads, self._server
            self._reset()
        threads.shutdown(cancel_futures=True)
        if server_ is not None:
            server_.stop()

    # ---------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Create fresh state; a fork of this process gets its own too."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.workers)
        self._server: Server | None = None

    def _current(self) -> Server:
        with self._lock:
            if self._server is None:
                self._server = self._start()
            return self._server

    def _start(self) -> Server:
        try:
            started = server.start(self.preload)
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
        level = logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG
        logger.log(level, "%s", started.layers)
        return started

    def _discard(self, dead: Server) -> None:
        with self._lock:
            if self._server is not dead:  # another thread has already replaced it
                return
            self._server = None
        dead.stop()
        logger.warning("the sandbox's fork server died unexpectedly; restarting it")

    def _ask(
        self, kind: str, files: Sequence[int], cpu_seconds: int, memory_mb: int
    ) -> dict[str, Any]:
        processes = 2 if kind == "check" else 1
        with self._memory.reserved(processes * (memory_mb << 20)):
            return self._try(kind, files, cpu_seconds, memory_mb)

    def _try(
        self, kind: str, files: Sequence[int], cpu_seconds: int, memory_mb: int
    ) -> dict[str, Any]:
        request = {"kind": kind, "cpu_seconds": cpu_seconds, "memory_bytes": memory_mb << 20}
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_SECONDS * 4 ** (attempt - 1))
                for file in files:
                    os.lseek(file, 0, os.SEEK_SET)
                os.ftruncate(files[2], 0)
            current = self._current()
            ends = current.ask(request, files)
            if ends is None:
                problem = "the fork server died"
                self._discard(current)
            elif "failed" in ends:
                problem = ends["failed"]
            elif not all(  # both processes share the offset of a file
                os.lseek(file, 0, os.SEEK_CUR) for file in files[: 2 if kind == "check" else 1]
            ):
                problem = f"a process exited before reading its input ({ends})"
            else:
                return ends
        raise SandboxError(f"the sandbox gave up after {ATTEMPTS} attempts: {problem}")


class _MemoryBudget:
    """Bounds the sum of the memory limits of running programs; a single program may always run."""

    def __init__(self, total: int) -> None:
        self._total, self._reserved = total, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserved(self, amount: int) -> Iterator[None]:
        """Wait until `amount` bytes are free, and reserve them."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._reserved or self._reserved + amount <= self._total
            )
            self._reserved += amount
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= amount
                self._changed.notify_all()


def _memory_bytes() -> int:
    """Memory of this machine or container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        with contextlib.suppress(OSError, ValueError):  # not in a cgroup, or "max"
            sizes.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(sizes)


@contextlib.contextmanager
def _files(program: Program, given: bytes) -> Iterator[list[int]]:
    """Memory files: the program, what its judge or it reads, and an empty one for results."""
    files: list[int] = []
    try:
        for content in (json.dumps(vars(program)).encode(), given, b""):
            files.append(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            written = 0
            while written < len(content):  # pwrite leaves the file offset at the start
                written += os.pwrite(files[-1], content[written : written + (1 << 24)], written)
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


def _ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def default_workers() -> int:
    """The available cores, divided by the ranks on this machine."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // _ranks())
