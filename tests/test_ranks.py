"""Test jobs run in fresh processes, and no thread of a process group outlives its run."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path

import pytest
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from gac.training.trainer import Trainer

from . import ranks
from .tiny import digit_reward, tiny_config


def origin():
    """The parent's process id and number of threads, and whether tqdm's lock was inherited."""
    parent = os.getppid()
    threads = list(Path(f"/proc/{parent}/task").iterdir())
    return parent, len(threads), hasattr(TqdmDefaultWriteLock, "mp_lock")


def test_children_are_forks_of_a_process_without_threads_and_locks():
    list(tqdm(range(3), disable=False))  # creates tqdm's lock in this process
    assert TqdmDefaultWriteLock.mp_lock is not None
    ((parent, threads, locked),) = ranks.run(origin, ranks=1)
    assert parent != os.getpid() and threads == 1 and not locked
    maps = Path(f"/proc/{parent}/maps").read_text()
    assert "libtorch_cpu" in maps  # the server has already imported torch


def test_timeout_names_the_call_and_leaves_no_process():
    with (
        pytest.raises(TimeoutError, match="rank 0 of pause .* 0.1 s"),
        ranks.job(signal.pause, ranks=1) as (rank,),
    ):
        rank.result(timeout=0.1)
    assert rank.process.exitcode == -signal.SIGKILL


def gloo_threads():
    """Names of this process's threads that belong to a process group."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def threads_during_run_and_at_exit(config):
    """Return how the run ended, and the process group's threads during the run and at exit."""
    during_run = []

    def attempt():
        trainer = Trainer(config)
        during_run.extend(gloo_threads())
        trainer.run()

    try:
        attempt()
    except (RuntimeError, KeyboardInterrupt) as error:
        sys.last_value = error  # as Python does with an uncaught exception
        ended_by = type(error).__name__
    else:
        ended_by = None
    atexit._run_exitfuncs()
    return ended_by, during_run, gloo_threads()


def overflowing_reward(completion, example):
    return 1e300 * digit_reward(completion, example)


def interrupting_reward(completion, example):
    signal.raise_signal(signal.SIGINT)
    return digit_reward(completion, example)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("reward", "end"),
    [
        ("tests.tiny:digit_reward", None),
        ("tests.test_ranks:overflowing_reward", "RunError"),
        ("tests.test_ranks:interrupting_reward", "KeyboardInterrupt"),
    ],
    ids=["done", "error", "interrupt"],
)
@pytest.mark.parametrize(
    "parallel", [{}, {"mode": "fsdp"}, {"mode": "fsdp", "replicas": 2}], ids=["ddp", "fsdp", "hsdp"]
)
def test_no_thread_of_a_process_group_outlives_the_run(task, tmp_path, parallel, reward, end):
    """Such a thread may free the last collective's tensors during interpreter shutdown, which
    aborts the process.
    """
    rollouts = {"prompts": 4, "completions": 4, "max_new_tokens": 5, "advantages": "centered"}
    config = tiny_config(
        task,
        tmp_path,
        steps=2,
        parallel=parallel,
        reward=reward,
        rollouts=rollouts,
        guards={"patience": 2},
        eval={},
    )
    for ended_by, during_run, at_exit in ranks.run(threads_during_run_and_at_exit, config, ranks=2):
        assert ended_by == end
        assert "pt_gloo_runloop" in during_run and at_exit == []
