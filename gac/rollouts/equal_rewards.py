"""Warns of rewards that teach nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from gac import collectives
from gac.collectives import rank

from .stats import SamplingStats

logger = logging.getLogger(__name__)


class EqualRewardWarning:
    """Warns if rewards were equal within every group for `PATIENCE` consecutive samplings.

    Each of its messages is given once: a solved task, a reward that has been the same for every
    rollout since the start or resume, and prompts of an unsuitable difficulty.

    demos: whether the run also trains on demonstrations, which may still teach.
    resampling: whether rollouts.dynamic_sampling_retries may be set.
    """

    PATIENCE = 10

    def __init__(self, demos: bool, resampling: bool) -> None:
        self.demos, self.resampling, self.given = demos, resampling, set[str]()
        self.steps, self.problem = 0, ""
        self.lowest, self.highest = math.inf, -math.inf

    def update(self, stats: SamplingStats, rewards: Sequence[float]) -> None:
        """Update the count with the statistics of one sampling; warn when it reaches `PATIENCE`.

        Both are this rank's, so every rank must call it.
        """
        groups, flat = collectives.total([stats.groups, stats.flat_groups])
        extremes = max(rewards, default=-math.inf), max((-r for r in rewards), default=-math.inf)
        highest, lowest = collectives.largest(extremes)
        self.lowest, self.highest = min(self.lowest, -lowest), max(self.highest, highest)
        problem = self._explain(-lowest) if groups > 0 and flat == groups else ""
        self.steps = self.steps + 1 if problem == self.problem else 1
        self.problem = problem
        if problem and self.steps >= self.PATIENCE and problem not in self.given and rank() == 0:
            self.given.add(problem)
            logger.warning("for %d steps, %s", self.steps, problem)

    def _explain(self, lowest: float) -> str:
        if self.lowest < self.highest and lowest == self.highest:
            return (
                f"all rollouts have earned the highest reward, {self.highest:g}: the training "
                "prompts are solved; stop here or choose harder ones"
            )
        retry = "set rollouts.dynamic_sampling_retries, " if self.resampling else ""
        check = "check the reward with `gac rewards check` and on samples.jsonl"
        if self.lowest < self.highest:
            return (
                "all rollouts of each prompt have had the same reward, so they teach nothing: "
                "choose prompts of another difficulty, "
                f"{retry}or {check}"
            )
        same = f"every rollout since the start or resume has had the reward {self.lowest:g}"
        if self.demos:
            return (
                f"{same}, so only the demonstrations teach: wait for the first solved prompt, and "
                f"if none comes, {check}"
            )
        return (
            f"{same}, so nothing teaches: {check}, choose easier prompts, or train on "
            "demonstrations first"
        )
