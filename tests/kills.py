"""Kills or stops a run at a point in its execution, so that machine load does not matter."""

import itertools
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gac.faults import processes
from gac.train_config import TrainConfig
from gac.training.trainer import train
from tests.tiny import digit_reward


def count_calls(config: TrainConfig) -> int:
    """Train; return the number of function calls and returns over all threads."""
    counter = itertools.count()
    _profile(lambda *_: next(counter))
    train(config)
    _profile(None)
    return next(counter)


def at_call(config: TrainConfig, number: int) -> Path:
    """Train; the process is killed at the `number`-th function call or return."""
    counter = itertools.count(1)
    _profile(lambda *_: _die() if next(counter) >= number else None)
    out = train(config)
    _profile(None)
    return out


def at_event(
    config: TrainConfig, event: str, name: str, rank: str = "0", number: int = signal.SIGKILL
) -> Path:
    """Train; `rank` gets a signal before the first audit `event` of a path that ends with `name`.

    For "os.rename", `name` is the destination.
    """
    signals = [number]
    processes.INTERVAL, processes.DEAD_AFTER = 0.2, 1.0  # the other rank is soon known to be dead

    def kill_at_event(event_name: str, values: tuple[Any, ...]) -> None:
        if event_name != event:
            return
        path = values[1] if event == "os.rename" else values[0]
        if str(path).endswith(name):
            os.kill(os.getpid(), signals.pop() if signals else 0)

    if os.environ.get("RANK", "0") == rank:
        sys.addaudithook(kill_at_event)
    return train(config)


def at_byte(config: TrainConfig, size: int) -> Path:
    """Train; the process is killed as soon as any file grows beyond `size` bytes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # stderr may be a file that is already larger
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    return train(config)


def reward(completion: str, example: Any) -> float:
    """The tiny task's reward; kills rank 1 on the first attempt once the path $KILL_AT exists."""
    if os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        path = os.environ.get("KILL_AT")
        if path and Path(path).exists():
            _die()
    return digit_reward(completion, example)


def _profile(hook: Callable[..., Any] | None) -> None:
    threading.setprofile(hook)
    sys.setprofile(hook)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
