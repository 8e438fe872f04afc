"""Worker processes that grade mathematics: started when first needed, replaced when one is cut off.

Plain subprocesses rather than `multiprocessing`: they neither fork a process that holds threads
and a GPU, nor import the caller's main module (and torch) again. A worker that its own timer ended
reads as end of file here. Workers end at the end of their stdin, so none outlives this process.
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

Pair = tuple[str, str]
"""Gold answer and given answer, as text for math-verify."""

_SCRIPT = Path(__file__).with_name("grading_worker.py")
_CUT_OFF = {-signal.SIGPROF, -signal.SIGALRM}
_GOODBYE = 5.0  # seconds for a worker to end by itself
_pools: weakref.WeakSet[GradingPool] = weakref.WeakSet()


class GradingPool:
    """Grades pairs on `workers` processes.

    Args:
        timeout: CPU seconds that one check may take.
        workers: processes; None: the cores that this process may use, shared with the other
            ranks of this machine, at most 4.
    """

    def __init__(self, timeout: float = 5.0, workers: int | None = None) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.timeout = timeout
        self.workers = workers or _default_workers()
        self._lock = threading.Lock()
        self._owner: int | None = None  # the process that made the threads and workers below
        self._threads: ThreadPoolExecutor
        self._idle: queue.LifoQueue[_Worker]
        _pools.add(self)

    def grade(self, pairs: Sequence[Pair]) -> list[str]:
        """One verdict per pair: "right", "wrong", "bad gold", "timeout" or "crash".

        A pair that ends its worker otherwise than by the timer is tried once more, then "crash".

        Raises:
            RuntimeError: a worker does not start (the message says why).
        """
        distinct = list(dict.fromkeys(pairs))  # rollouts of one prompt often agree
        with self._lock:
            if self._owner != os.getpid():  # first use, or first use after a fork
                self._open()
            verdicts = self._threads.map(self._grade_one, distinct)
        graded = dict(zip(distinct, verdicts, strict=True))
        return [graded[pair] for pair in pairs]

    def close(self) -> None:
        """End the workers; the next `grade` starts new ones."""
        with self._lock:
            if self._owner == os.getpid():
                self._threads.shutdown(cancel_futures=True)
                while not self._idle.empty():
                    self._idle.get().stop()
            self._owner = None

    def _open(self) -> None:
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="grading")
        self._idle = queue.LifoQueue()  # last in, first out: a small batch starts few workers
        for _ in range(self.workers):
            self._idle.put(_Worker(self.timeout))
        self._owner = os.getpid()

    def _grade_one(self, pair: Pair) -> str:
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
    """One process, started at its first question and again after each death."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def ask(self, pair: Pair) -> str:
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        try:
            process.stdin.write(json.dumps(pair) + "\n")
            process.stdin.flush()
            verdict = process.stdout.readline()
        except BrokenPipeError:  # it died while idle
            verdict = ""
        if verdict:
            return verdict.rstrip("\n")
        return "timeout" if self.stop() in _CUT_OFF else "crash"

    def stop(self) -> int | None:
        """End it; its exit status (None if it never ran)."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a dead worker never read the question
            process.stdin.write("\n")  # the end of file may not come: a fork holds the pipe, too
            process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _start(self) -> subprocess.Popen[str]:
        # -P keeps this folder off the import path; a session of its own keeps Ctrl-C away.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(self._timeout), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        assert process.stdout is not None
        greeting = process.stdout.readline().rstrip("\n")
        if greeting != "ready":
            process.kill()
            status = process.wait()
            raise RuntimeError(
                f"the grading worker did not start ({greeting or f'exit status {status}'}); "
                f"try: {sys.executable} -c 'import math_verify'"
            )
        return process


def _unlock() -> None:
    """A fork has the locks of its parent, and not the threads that would release them."""
    for pool in _pools:
        pool._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def _default_workers() -> int:
    # macOS does not tell which cores a process may use
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(4, cores // ranks))
