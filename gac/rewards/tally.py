"""Reports a reward's event counts as metrics and in the log, and closes it at the end of the run."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

from .base import Reward

logger = logging.getLogger(__name__)


class Tally:
    """A reward's event counts over all ranks, since the last call."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._told = events(reward)

    def news(self) -> dict[str, int]:
        """Return `reward_dropped` and `reward_<name>` for each count. Collective: every rank must
        call it.

        Events during an evaluation are reported with the next step.
        """
        now = events(self.reward)
        fresh = {name: count - self._told.get(name, 0) for name, count in now.items()}
        self._told = now
        return {f"reward_{name}": count for name, count in _over_ranks(fresh).items()}


def events(reward: Reward) -> dict[str, int]:
    """This process's cumulative counts, including dropped rows."""
    return {"dropped": reward.dropped, **reward.counts()}


@contextlib.contextmanager
def in_use(reward: Reward) -> Iterator[None]:
    """Context manager that logs this process's counts and closes the reward on exit, even after an
    error.
    """
    try:
        yield
    finally:
        try:
            seen = ", ".join(f"{count} {name}" for name, count in events(reward).items() if count)
            if seen:
                logger.warning("reward %s, in this process: %s", reward.name, seen)
        finally:
            reward.close()


def _over_ranks(mine: dict[str, int]) -> dict[str, int]:
    import torch.distributed as dist

    if not dist.is_initialized():
        return mine
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    total: Counter[str] = Counter()
    for one in everyone:
        total.update(one)
    return dict(total)
