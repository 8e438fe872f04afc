"""kill -9 at a moment that the run itself reaches, the same on a busy machine and an idle one."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gac.train_config import TrainConfig
from gac.training.trainer import train

from .tiny import digit_reward


def count_calls(config: TrainConfig) -> int:
    """Train; the calls and returns of functions in it, of every thread."""
    counter = itertools.count()
    _profile(lambda *_: next(counter))
    train(config)
    _profile(None)
    return next(counter)


def at_call(config: TrainConfig, number: int) -> Path:
    """Train, killed at the `number`-th of those."""
    counter = itertools.count(1)
    _profile(lambda *_: _die() if next(counter) >= number else None)
    out = train(config)
    _profile(None)
    return out


def at_event(config: TrainConfig, event: str, name: str, rank: str = "0") -> Path:
    """Train, killed on `rank` just before it opens or renames ("open", "os.rename") what ends
    with `name`: the file to open, the new name."""

    def look(found: str, values: tuple[Any, ...]) -> None:
        if found == event and str(values[event == "os.rename"]).endswith(name):
            _die()

    if os.environ.get("RANK", "0") == rank:
        sys.addaudithook(look)
    return train(config)


def at_byte(config: TrainConfig, size: int) -> Path:
    """Train, killed in the first file that grows beyond `size` bytes, at that byte."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # may be a file, of any size
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    return train(config)


def reward(completion: str, example: Any) -> float:
    """The tiny task's; rank 1 of a job's first attempt dies once the path KILL_AT is there."""
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
