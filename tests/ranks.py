"""Jobs of real processes for the tests: fresh ones, which share no lock with anybody.

They are forks of a server that has imported what they need and run none of it: it has one thread
and holds no lock, so no child can wait for one that a killed process had. The rendezvous store of
a job lives in the test, as torchrun's lives in its agent. Every wait has a deadline and says what
it waited for; a process that does not end shows where it stands, and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy
import torch
import torch.distributed as dist

DEADLINE = 240.0  # seconds for what a process does in a test
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch.distributed.checkpoint", "gac.training.trainer", "tests.tiny"]


class Failed:
    """What went wrong on a rank."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.trace = error, traceback.format_exc()


class Rank:
    """One process of a job, as the test sees it."""

    def __init__(self, name: str, process: BaseProcess, pipe: Connection) -> None:
        self.name, self.process, self._pipe = name, process, pipe

    def result(self, timeout: float = DEADLINE) -> Any:
        """What it returned, its `Failed`, or None if it was killed."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"{self.name} gave no result within {timeout} s")
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            self.process.join(DEADLINE)
            if self.process.exitcode >= 0:
                raise RuntimeError(f"{self.name} ended with no result, by itself") from None
            return None

    def kill(self) -> bool:
        """kill -9; False if it had ended by itself."""
        alive = self.process.is_alive()
        if alive:
            self.process.kill()
        self.process.join(DEADLINE)
        if self.process.is_alive():
            raise TimeoutError(f"{self.name} was killed and is still there after {DEADLINE} s")
        return alive


@contextlib.contextmanager
def job(work: Callable[..., Any], *args: Any, ranks: int) -> Iterator[list[Rank]]:
    """`work(*args)` in `ranks` new processes that find each other as under torchrun.

    The end of the block kills what is left of them, and prints what they printed.
    """
    start_server()
    task = pickle.dumps((work, args))  # plain, for torch's own way shares the tensors' memory
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started: list[Rank] = []
    with tempfile.NamedTemporaryFile("r", errors="replace") as printed:
        try:
            for rank in range(ranks):
                here, there = CONTEXT.Pipe(duplex=False)
                told = (rank, ranks, store.port, there, printed.name)
                process = CONTEXT.Process(target=_child, args=(task, *told))
                process.start()
                there.close()
                started.append(Rank(f"rank {rank} of {work.__name__}", process, here))
            yield started
        finally:
            for one in started:
                one.kill()
            sys.stderr.write(printed.read())


def run(work: Callable[..., Any], *args: Any, ranks: int, timeout: float = DEADLINE) -> list[Any]:
    """The result of `work(*args)` on each rank; an error of any rank is raised here."""
    with job(work, *args, ranks=ranks) as started:
        results = [one.result(timeout) for one in started]
        for one in started:
            one.process.join(5)
    for result in results:
        if isinstance(result, Failed):
            raise AssertionError(result.trace) from result.error
    return results


def errors(work: Callable[..., Any], *args: Any, ranks: int) -> list[str]:
    """The message with which `work(*args)` fails on each rank."""
    with job(work, *args, ranks=ranks) as started:
        results = [one.result() for one in started]
    assert all(isinstance(result, Failed) for result in results), results
    return [str(result.error) for result in results]


def start_server() -> None:
    """Start the server of `job`, if it does not run; its imports take seconds, this does not."""
    for name in PRELOADED:
        importlib.import_module(name)  # the server would pass over a name that is wrong
    CONTEXT.set_forkserver_preload(PRELOADED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # a BLAS starts its threads when it is imported
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _child(task: bytes, rank: int, ranks: int, port: int, pipe: Connection, printed: str) -> None:
    output = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(DEADLINE - 10, exit=True)
    multiprocessing.set_start_method(None, force=True)  # as in a process that nobody forked
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
    try:
        work, args = pickle.loads(task)
        result = work(*args)
    except BaseException as error:  # an interrupt, too, is a result here
        result = Failed(error)
    pipe.send_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)
