"""Real processes for the tests, forked after the imports: a job of several ranks starts at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

CONTEXT = multiprocessing.get_context("fork")


def start(work: Callable[..., Any], *args: Any, ranks: int = 1) -> list[tuple[BaseProcess, Any]]:
    """`work(*args)` in `ranks` new processes that find each other as under torchrun."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_child, args=(work, args, rank, ranks, port, there))
        process.start()
        there.close()
        started.append((process, here))
    return started


def run(work: Callable[..., Any], *args: Any, ranks: int, timeout: float = 120) -> list[Any]:
    """The result of `work(*args)` on each rank; an error of any rank is raised here."""
    started = start(work, *args, ranks=ranks)
    try:
        results = [collect(pipe, timeout) for _, pipe in started]
    finally:
        for process, _ in started:
            process.join(5)
            process.kill()
    for result in results:
        if isinstance(result, Failed):
            raise AssertionError(result.trace) from result.error
    return results


class Failed:
    """What went wrong on a rank."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.trace = error, traceback.format_exc()


def collect(pipe: Any, timeout: float = 120) -> Any:
    """What a rank returned, its `Failed`, or None if it was killed."""
    if not pipe.poll(timeout):
        raise TimeoutError(f"a rank did not answer within {timeout} s")
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def kill(process: BaseProcess, after: float = 0.0) -> bool:
    """kill -9 `after` so many seconds; False if it had ended by itself."""
    time.sleep(after)
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return alive


def _child(
    work: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, port: int, pipe: Any
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # the parent's is of one process
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        }  # fmt: skip
    try:
        result = work(*args)
    except BaseException as error:  # an interrupt, too, is a result here
        result = Failed(error)
    # plain pickle: the one of torch's queues shares memory that ends with this process
    pipe.send_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)
