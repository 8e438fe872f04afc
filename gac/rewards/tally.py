"""Reports a reward's event counts as metrics and in the log; closes the reward after the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from .base import Reward

logger = logging.getLogger(__name__)


class Tally:
    """Counts a reward's events over all ranks."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._reported = event_counts(reward)

    def new_counts(self) -> dict[str, int]:
        """New events over all ranks since the last call: `reward_dropped`, `reward_<name>`, ...

        Collective: every rank must call it. Events during an evaluation are reported with the next
        step.
        """
        now = event_counts(self.reward)
        since = {name: count - self._reported.get(name, 0) for name, count in now.items()}
        self._reported = now
        from gac.parallel.collectives import total_counts  # imports torch

        return {f"reward_{name}": count for name, count in total_counts(since).items()}


def event_counts(reward: Reward) -> dict[str, int]:
    """This process's cumulative counts, including dropped rows."""
    return {"dropped": reward.dropped, **reward.counts()}


@contextlib.contextmanager
def closing_reward(reward: Reward) -> Iterator[None]:
    """Context manager that logs this process's counts and closes the reward on exit."""
    try:
        yield
    finally:
        try:
            nonzero = [f"{n} {name}" for name, n in event_counts(reward).items() if n]
            if nonzero:
                logger.warning("reward %s: %s in this process", reward.name, ", ".join(nonzero))
        finally:
            reward.close()
