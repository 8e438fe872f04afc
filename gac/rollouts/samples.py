"""One rollout of one prompt as a sample, and as a training row."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gac.data import Example
from gac.rows import Row
from gac.types import Stage


class Sample(NamedTuple):
    """One rollout of one prompt, with its reward."""

    prompt: tuple[int, ...]
    prefix: tuple[int, ...]  # demonstration tokens given before the completion
    completion: tuple[int, ...]
    reward: float  # nan: dropped
    train_prefix: bool
    truncated: bool  # at `max_completion_length`, without a stop token
    mask: tuple[bool, ...] = ()  # see `Row.mask`; without the prefix
    logps: tuple[float, ...] = ()  # of `completion` in the engine, if known


def scored(group: Sequence[Sample]) -> list[float]:
    """Rewards of the samples of a group that have a completion and were not dropped."""
    return [s.reward for s in group if s.completion and not math.isnan(s.reward)]


def is_flat(group: Sequence[Sample]) -> bool:
    """Whether all rewards of a group of at least two are equal, so that all advantages are 0."""
    rewards = scored(group)
    return len(rewards) > 1 and min(rewards) == max(rewards)


def prefix_of(
    example: Example, group: Sequence[Sample], stage: Stage, step: int, seed: int
) -> tuple[int, ...]:
    """Demonstration tokens to append to the prompt; () if the mean reward is >= `stage.below`."""
    rewards = [s.reward for s in group if not math.isnan(s.reward)]
    mean = sum(rewards) / len(rewards) if rewards else -math.inf
    if not example.demo or mean >= stage.below:
        return ()
    if stage.length is None:
        return example.demo[: math.ceil(stage.prefix * len(example.demo))]
    rng = random.Random(f"{seed}:{step}:{example.id}")  # the same on any rank and after a resume
    return example.demo[: stage.length(step, len(example.demo), rng)]


def row_of(sample: Sample, advantage: float) -> Row:
    """The training row of a sample."""
    switch = len(sample.prompt) + len(sample.prefix)
    start = len(sample.prompt) if sample.train_prefix else switch
    mask = (True,) * (switch - start) + sample.mask if sample.mask else ()
    own = sample.mask or (True,) * len(sample.logps)
    logps = tuple(itertools.compress(sample.logps, own))
    return Row(
        sample.prompt + sample.prefix + sample.completion,
        start,
        not sample.completion,  # then the prefix is the complete demonstration
        advantage,
        switch=switch,
        engine_logps=(math.nan,) * (switch - start) + logps if logps else (),
        mask=mask,
    )


def turns_of(sample: Sample, text: Callable[[Sequence[int]], str]) -> list[list[Any]]:
    """[text, whether it has a loss] of each turn of a rollout."""
    pairs = zip(sample.completion, sample.mask, strict=True)
    turns = itertools.groupby(pairs, key=operator.itemgetter(1))
    return [[text([token for token, _ in turn]), learned] for learned, turn in turns]


def pair_of(group: list[Sample]) -> list[Row]:
    """Rows of the best and the worst rollout, if their rewards differ; ties go to the first."""
    scored = [s for s in group if not math.isnan(s.reward)]
    if len({s.reward for s in scored}) < 2:
        return []
    best, worst = (pick(scored, key=lambda s: s.reward) for pick in (max, min))
    return [row_of(best, 1.0), row_of(worst, -1.0)]
