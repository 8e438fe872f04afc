"""Functions that score several rows at once, try again, and have a deadline."""

import asyncio
import threading

import pytest

from gac.rewards import RewardError, build_reward
from tests.rewards.test_rewards import example, score

TOGETHER = threading.Barrier(3, timeout=20)
ATTEMPTS: list = []
WAITS: list[float] = []
LATE = threading.Event()


def wait_in_thread(completion, example, factor=1):
    """Return only when three rows are being scored."""
    TOGETHER.wait()
    return factor * len(completion)


async def wait_in_loop(completion, example, factor=1):
    """The same in an event loop."""
    ATTEMPTS.append(completion)
    wanted = -(-len(ATTEMPTS) // 3) * 3
    while len(ATTEMPTS) < wanted:
        await asyncio.sleep(0)
    return factor * len(completion)


@pytest.mark.parametrize("function", [wait_in_thread, wait_in_loop])
def test_rows_are_scored_at_once(function):
    spec = {"name": f"{__name__}:{function.__name__}", "concurrency": 3, "factor": 2}
    completions = ["a", "bb", "ccc", "d", "ee", "fff"]
    ATTEMPTS.clear()
    assert build_reward(spec)(completions, [example()] * 6) == [2.0, 4.0, 6.0] * 2


async def count_running(completion, example):
    ATTEMPTS.append(completion)
    await asyncio.sleep(0)  # all that may run have started
    running = len(ATTEMPTS)
    await asyncio.sleep(0)
    ATTEMPTS.pop()
    return running


def test_sixteen_rows_are_scored_at_once_by_default():
    ATTEMPTS.clear()
    assert max(build_reward(f"{__name__}:count_running")(["x"] * 40, [example()] * 40)) == 16


def fails_twice(completion, example):
    if len(WAITS) < 2:
        raise OSError("service is busy")
    return 1.0


def never(completion, example):
    ATTEMPTS[:] = [threading.current_thread()]
    LATE.wait(20)


async def fails(completion, example):
    raise {"exits": SystemExit, "times out": TimeoutError}[completion]("service is down")


def test_retries_and_the_deadline_of_a_concurrent_reward(monkeypatch):
    async def wait(seconds):
        WAITS.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", wait)
    WAITS.clear()
    for completion in ("exits", "times out"):
        with pytest.raises(RewardError, match="service is down"):
            score(build_reward({"name": f"{__name__}:fails"}), completion)
    with pytest.raises(ValueError, match="batch scores all rows in one call"):
        build_reward({"name": f"{__name__}:fails", "batch": True})
    assert not WAITS  # no retries
    assert score(build_reward({"name": f"{__name__}:fails_twice", "retries": 5}), "x") == 1.0
    assert WAITS == [1.0, 2.0]
    with pytest.raises(
        RewardError, match=r"0.05 s \(key `deadline` of the reward\); prompt: 'prompt'; completion"
    ):
        score(build_reward({"name": f"{__name__}:never", "retries": 0, "deadline": 0.05}), "x")
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    LATE.set()
    ATTEMPTS[0].join(20)
    assert ATTEMPTS[0].daemon  # a call that hangs does not keep the process alive
    assert not failed  # nobody waits for the result any more, but that is no error of the thread
