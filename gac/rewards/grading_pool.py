"""Worker processes that grade math answers.

Workers are started on demand and restarted after a timeout or a crash. The pool uses plain
subprocesses instead of `multiprocessing`, which would either fork a process that holds threads and
a GPU or import the caller's main module (and torch) again. A worker killed by its own timer appears
here as end of file. Workers exit when their stdin closes, so none outlives this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gac.errors import is_count, is_real, require

from .capacity import default_workers

AnswerPair = tuple[str, str]
"""Reference answer and model answer, as text for math-verify."""

_SCRIPT = Path(__file__).with_name("grading_worker.py")
_TIMEOUT_STATUSES = {-signal.SIGPROF, -signal.SIGALRM}
_STOP_SECONDS = 5.0  # seconds to wait for a worker to exit before killing it
_pools: weakref.WeakSet[GradingPool] = weakref.WeakSet()


class GradingPool:
    """Grades answer pairs in parallel worker processes.

    Args:
        timeout: CPU-time limit per check, in seconds.
        workers: number of processes; None: available cores divided by the ranks on this machine, at
            most 4.
    """

    def __init__(self, timeout: float, workers: int | None = None) -> None:
        require(is_real(timeout) and timeout > 0, "timeout", timeout, "a finite number > 0")
        require(workers is None or is_count(workers, 1), "workers", workers, "an integer >= 1")
        self.timeout = timeout
        self.workers = workers or min(4, default_workers())
        self._lock = threading.Lock()
        # pid of the process that created the threads and workers below
        self._owner: int | None = None
        self._threads: ThreadPoolExecutor
        self._idle: queue.LifoQueue[_Worker]
        _pools.add(self)

    def grade(self, pairs: Sequence[AnswerPair]) -> list[str]:
        """One verdict per pair: "right", "wrong", "bad reference", "timeout" or "crash".

        A pair whose worker dies for any reason but the timer is retried once, then counts as
        "crash".

        Raises:
            RuntimeError: a worker failed to start (the message says why).
        """
        distinct = list(dict.fromkeys(pairs))  # rollouts of a prompt often share an answer
        with self._lock:
            if self._owner != os.getpid():  # first use, or first use after a fork
                self._open()
            verdicts = self._threads.map(self._grade_one, distinct)
        graded = dict(zip(distinct, verdicts, strict=True))
        return [graded[pair] for pair in pairs]

    def close(self) -> None:
        """Stop the workers; the next `grade` starts new ones."""
        with self._lock:
            if self._owner == os.getpid():
                self._threads.shutdown(cancel_futures=True)
                while not self._idle.empty():
                    self._idle.get().stop()
            self._owner = None

    def _open(self) -> None:
        self._threads = ThreadPoolExecutor(self.workers)
        self._idle = queue.LifoQueue()  # LIFO, so that a small batch starts only a few workers
        for _ in range(self.workers):
            self._idle.put(_Worker(self.timeout))
        self._owner = os.getpid()

    def _grade_one(self, pair: AnswerPair) -> str:
        worker = self._idle.get()
        try:
            for _ in range(2):
                verdict = worker.ask(pair)
                if verdict != "crash":
                    break
            return verdict
        finally:
            self._idle.put(worker)


class _Worker:
    """One worker process, started on its first request and restarted whenever it dies."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def ask(self, pair: AnswerPair) -> str:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(pair) + "\n")
            process.stdin.flush()
            verdict = process.stdout.readline()
        except BrokenPipeError:  # it died while idle
            verdict = ""
        if verdict:
            return verdict.rstrip("\n")
        return "timeout" if self.stop() in _TIMEOUT_STATUSES else "crash"

    def stop(self) -> int | None:
        """Stop the process and return its exit status (None if it was never started)."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the worker died before reading its request
            # closing may not deliver end of file: a forked child can hold the pipe open
            process.stdin.write("\n")
            process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _start(self) -> subprocess.Popen[str]:
        # -P keeps this folder off the import path; a separate session shields the worker from
        # Ctrl-C.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(self._timeout), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,
        )
        assert process.stdout is not None
        greeting = process.stdout.readline().rstrip("\n")
        if greeting != "ready":
            process.kill()
            status = process.wait()
            raise RuntimeError(
                f"the grading worker failed to start ({greeting or f'exit status {status}'}); "
                f"to see why, run: {sys.executable} -c 'import math_verify'"
            )
        return process


def _unlock() -> None:
    """Replace the locks in a forked child, which lacks the threads that would release them."""
    for pool in _pools:
        pool._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
