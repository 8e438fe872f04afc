"""Multi-process jobs for the tests. Each job runs in fresh processes that share no locks.

Processes are forked from a server that has imported the modules they need but run nothing. The
server has one thread and holds no locks, so a child cannot deadlock on a lock that a killed process
held. A job's rendezvous store runs in the test process, as torchrun's runs in its agent. Every wait
has a timeout and reports what it waited for; a hung process dumps its stack traces and exits.
"""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy
import torch
import torch.distributed as dist

from gac.parallel import process_group
from gac.study import runs

DEADLINE = 480.0  # timeout in seconds for a process in a test
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "pytest",
    "torch.distributed.checkpoint",
    "gac.training.trainer",
    "transformers.models.qwen2.modeling_qwen2",
    "tests.tiny",
]


class Failed:
    """The exception raised on a rank, with its traceback."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.trace = error, traceback.format_exc()
        self.time = time.monotonic()


class Rank:
    """A process of a job, as the test sees it."""

    def __init__(self, name: str, process: BaseProcess, pipe: Connection) -> None:
        self.name, self.process, self._pipe = name, process, pipe

    def result(self, timeout: float = DEADLINE) -> Any:
        """The return value of `work`; a `Failed` if it raised; None if the process was killed."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"{self.name} returned no result within {timeout} s")
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            self.process.join(DEADLINE)
            if (self.process.exitcode or 0) >= 0:
                raise RuntimeError(f"{self.name} exited without a result") from None
            return None

    def kill(self) -> bool:
        """Send SIGKILL; return False if the process had already exited."""
        alive = self.process.is_alive()
        if alive:
            self.process.kill()
        self.process.join(DEADLINE)
        if self.process.is_alive():
            raise TimeoutError(f"{self.name} is still alive {DEADLINE} s after SIGKILL")
        return alive


@contextlib.contextmanager
def job(work: Callable[..., Any], *args: Any, ranks: int) -> Iterator[list[Rank]]:
    """Run `work(*args)` in `ranks` new processes, with the environment that torchrun would set.

    At the end of the block, the remaining processes are killed and the output is printed.
    """
    start_server()
    task = pickle.dumps((work, args))  # plain: torch's reducers would share the tensors' memory
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started: list[Rank] = []
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        try:
            for rank in range(ranks):
                receiver, sender = CONTEXT.Pipe(duplex=False)
                child_args = (task, rank, ranks, store.port, sender, output.name)
                process = CONTEXT.Process(target=_child, args=child_args)
                process.start()
                sender.close()
                started.append(Rank(f"rank {rank} of {work.__name__}", process, receiver))
            yield started
        finally:
            for running in started:
                running.kill()
            sys.stderr.write(output.read())


def run(work: Callable[..., Any], *args: Any, ranks: int, timeout: float = DEADLINE) -> list[Any]:
    """Return the result of `work(*args)` on each rank; raise if any rank failed."""
    with job(work, *args, ranks=ranks) as started:
        results = [rank.result(timeout) for rank in started]
        for rank in started:
            rank.process.join(5)
    failed = [result for result in results if isinstance(result, Failed)]
    if failed:  # the others lost their connection to the first, or to one that a signal ended
        first = min(failed, key=lambda result: result.time)
        ended = [f"{r.name}: exit code {r.process.exitcode}" for r in started if r.process.exitcode]
        raise AssertionError("\n".join([*ended, first.trace])) from first.error
    return results


def each(cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The result of each of `cases`, a function and its arguments, computed in this process.

    As the `work` of a job, this saves the start of a job for each of them.
    """
    results = {}
    for name, (work, *args) in cases.items():
        try:
            results[name] = work(*args)
        except BaseException as error:  # re-raised
            error.add_note(f"in the case {name}")
            raise
    return results


def errors(work: Callable[..., Any], *args: Any, ranks: int) -> list[str]:
    """Return the error message of `work(*args)` on each rank; every rank must fail."""
    with job(work, *args, ranks=ranks) as started:
        results = [rank.result() for rank in started]
    assert all(isinstance(result, Failed) for result in results), results
    return [str(result.error) for result in results]


def start_server() -> None:
    """Start the fork server if it is not running, without waiting seconds for its imports."""
    for name in PRELOADED:
        importlib.import_module(name)  # the server silently ignores modules it cannot import
    runs.start_server(PRELOADED)


def _child(
    task: bytes, rank: int, ranks: int, port: int, pipe: Connection, output_path: str
) -> None:
    gc.set_threshold(10_000)  # as in conftest.py
    gc.freeze()
    output = os.open(output_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(DEADLINE - 10, exit=True)
    multiprocessing.set_start_method(None, force=True)  # as in a process that was not forked
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    try:
        work, args = pickle.loads(task)
        result = work(*args)
    except BaseException as error:  # KeyboardInterrupt and SystemExit are also reported to the test
        result = Failed(error)
    pipe.send_bytes(pickle.dumps(result))
    if not isinstance(result, Failed):
        process_group.wait_for_others()
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)
