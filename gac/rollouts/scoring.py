"""Texts and rewards of rollouts, for training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.data import Example
from gac.rewards.completion import Decoder
from gac.types import Rollout


def is_truncated(rollout: Rollout, stops: Container[int], limit: int) -> bool:
    """Whether a limit ended the completion; its last turn may be the environment's."""
    ids, mask = rollout.completion_ids, rollout.loss_mask
    if ids[-1] in stops:
        return False
    return not len(mask) or bool(mask[-1]) or len(ids) >= limit


class Scores(NamedTuple):
    """Texts and rewards of rollouts, one each."""

    texts: list[str]
    rewards: list[float | None]
    """None: dropped."""
    terms: Mapping[str, Sequence[float]]
    """Name -> values of a reward that adds up others, for the rows that it scored; nan: failed."""

    def numbers(self) -> list[float]:
        """The rewards; nan: dropped."""
        return [math.nan if reward is None else reward for reward in self.rewards]


def score(
    reward: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    rollouts: Sequence[Rollout],
    truncated: Sequence[bool],
    step: int | None = None,
) -> Scores:
    """Texts and rewards of the rollouts of `examples`, one each.

    The configured `reward` scores the rollouts that have no reward of their own; it sees in
    `Example.truncated` whether each completion was cut off. `step` is the optimizer step, for a
    reward that depends on it.
    """
    if step is not None:
        reward.set_step(step)
    text = Decoder(tokenizer)
    if getattr(reward, "reasoning", ()) is None:
        reward.reasoning = text.markers
    texts = [text(r.completion_ids) for r in rollouts]
    scores = [None if r.reward is None else float(r.reward) for r in rollouts]
    rows = [i for i, s in enumerate(scores) if s is None]
    extended = [
        replace(
            examples[i],
            extra={**examples[i].extra, **rollouts[i].extra},
            truncated=truncated[i],
        )
        if rollouts[i].extra or truncated[i]
        else examples[i]
        for i in rows
    ]
    if not rows:
        return Scores(texts, scores, {})
    graded = reward.grade([texts[i] for i in rows], extended)
    for i, value in zip(rows, graded.rewards, strict=True):
        scores[i] = value
    return Scores(texts, scores, graded.terms)
