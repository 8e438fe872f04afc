"""Test jobs run in fresh processes, and no thread of a process group outlives its run."""

import atexit
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from gac.parallel import process_group
from gac.study import runs
from gac.training.trainer import Trainer
from tests import ranks
from tests.parallel.test_distributed import FULL
from tests.tiny import digit_reward, tiny_config


def origin():
    """The parent's process id and number of threads, whether tqdm's lock was inherited, and whether
    an import has switched off all warnings.
    """
    parent = os.getppid()
    threads = list(Path(f"/proc/{parent}/task").iterdir())
    silent = ("ignore", None, Warning, None, 0) in warnings.filters
    return parent, len(threads), hasattr(TqdmDefaultWriteLock, "mp_lock"), silent


def threads_of_a_new_server():
    """Of BLAS in processes of a fork server, and in this one, which starts the server."""
    os.environ["OMP_NUM_THREADS"] = "3"
    runs.start_server([])
    with runs.PROCESSES.Pool(1) as pool:
        return pool.apply(os.getenv, ["OMP_NUM_THREADS"]), os.environ["OMP_NUM_THREADS"]


def test_children_are_forks_of_a_process_without_threads_and_locks():
    list(tqdm(range(3), disable=False))  # creates tqdm's lock in this process
    assert TqdmDefaultWriteLock.mp_lock is not None
    ((parent, threads, locked, silent),) = ranks.run(origin, ranks=1)
    assert parent != os.getpid()
    assert threads == 1
    assert not locked
    assert not silent
    # the server has already imported torch
    assert "libtorch_cpu" in Path(f"/proc/{parent}/maps").read_text()
    assert ranks.run(threads_of_a_new_server, ranks=1) == [("1", "3")]


def test_timeout_names_the_call_and_leaves_no_process():
    with (
        pytest.raises(TimeoutError, match="rank 0 of pause .* 0.1 s"),
        ranks.job(signal.pause, ranks=1) as (rank,),
    ):
        rank.result(timeout=0.1)
    assert rank.process.exitcode == -signal.SIGKILL


def last_work_seen():
    """Whether rank 1 had done its last work when this rank went on after waiting for it."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("rank 0 has finished", "")
    else:
        store.wait(["rank 0 has finished"], timedelta(seconds=ranks.DEADLINE))
        sum(range(10**7))
        store.set("rank 1 has finished", "")
    process_group.leave()
    return store.check(["rank 1 has finished"])


def test_ranks_that_have_finished_wait_for_the_others():
    assert ranks.run(last_work_seen, ranks=2) == [True, True]


def connect():
    """Start a group of two ranks; a rank that exited before the other connects would break it."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {dist.get_rank()}", "")
    store.wait(["rank 0", "rank 1"], timedelta(seconds=ranks.DEADLINE))


def wait_for_a_rank_that_never_arrives():
    process_group.LONGEST_WAIT = 0.01
    connect()
    if dist.get_rank() == 0:
        process_group.leave()
    return dist.is_initialized()


def test_nobody_waits_for_ever_or_after_an_error():
    assert ranks.run(wait_for_a_rank_that_never_arrives, ranks=2) == [False, True]
    assert ranks.errors(leave_after_an_error, ranks=2) == ["0", "1"]


def leave_after_an_error():
    """Only rank 0 leaves; it would wait for rank 1 for longer than the test's deadline."""
    process_group.LONGEST_WAIT = 10 * ranks.DEADLINE
    connect()
    rank = dist.get_rank()
    try:
        raise ValueError(rank)
    finally:
        if rank == 0:
            process_group.leave()


def gloo_threads():
    """Names of this process's threads that belong to a process group."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def threads_during_run_and_at_exit(config):
    """Return how the run ended, and the process group's threads during the run and at exit."""
    ended_by, during_run = None, []
    # shells start background jobs, and thus their children, with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def attempt():
        trainer = Trainer(config)
        during_run.extend(gloo_threads())
        trainer.run()

    try:
        attempt()
    except (RuntimeError, KeyboardInterrupt) as error:
        # as Python does with an uncaught exception, here one that was raised while handling `error`
        sys.last_value = ValueError()
        sys.last_value.__context__ = error
        ended_by = type(error).__name__
    atexit._run_exitfuncs()
    return ended_by, during_run, gloo_threads()


HSDP = {"mode": "fsdp", "replicas": 2}  # the most process groups


def overflowing_reward(completion, example):
    return 1e300 * digit_reward(completion, example)


def interrupting_reward(completion, example):
    signal.raise_signal(signal.SIGINT)
    return digit_reward(completion, example)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parallel", "reward", "end"),
    [
        ({}, "tests.tiny:digit_reward", None),
        ({"mode": "fsdp"}, "tests.tiny:digit_reward", None),
        pytest.param(HSDP, "tests.tiny:digit_reward", None, marks=FULL),
        (HSDP, "tests.parallel.test_ranks:overflowing_reward", "RunError"),
        (HSDP, "tests.parallel.test_ranks:interrupting_reward", "KeyboardInterrupt"),
    ],
    ids=["ddp", "fsdp", "hsdp", "hsdp-error", "hsdp-interrupt"],
)
def test_no_thread_of_a_process_group_outlives_the_run(task, tmp_path, parallel, reward, end):
    """Such a thread may free the last collective's tensors during interpreter shutdown, which
    aborts the process.
    """
    rollouts = {
        "num_prompts": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        "scale_rewards": "centered",
    }
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
        assert "pt_gloo_runloop" in during_run
        assert at_exit == []
