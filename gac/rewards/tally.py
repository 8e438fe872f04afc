"""What a reward counted and holds, told to the run that uses it: metrics, log, and the end."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

from .base import Reward

logger = logging.getLogger(__name__)


class Tally:
    """The events of a reward over all ranks, since the last question."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._told = events(reward)

    def news(self) -> dict[str, int]:
        """`reward_dropped` and `reward_<name>` of each count; every rank must ask.

        Scores of an evaluation count as news of the step after it.
        """
        now = events(self.reward)
        fresh = {name: count - self._told.get(name, 0) for name, count in now.items()}
        self._told = now
        return {f"reward_{name}": count for name, count in _over_ranks(fresh).items()}


def events(reward: Reward) -> dict[str, int]:
    """Rows dropped and all other counts of this process so far."""
    return {"dropped": reward.dropped, **reward.counts()}


@contextlib.contextmanager
def in_use(reward: Reward) -> Iterator[None]:
    """In the end, also after an error: log what the reward counted here, and close it."""
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
