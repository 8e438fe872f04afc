"""The rollouts of one step: prompts, responses, rewards, advantages, training rows.

Legend: Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.data import Example
from gac.data.rows import Batch, Row, demo_row
from gac.parallel import collectives
from gac.parallel.collectives import rank, ranks

from .advantages import Credit
from .engines import Engine, Policy
from .generation import RolloutConfig
from .plan import Sampling, Stage

Crediting = Callable[[Tensor, Tensor | None, str], Credit]  # see `group_credit`


class SamplingStats(NamedTuple):
    """Amount and duration of this rank's sampling."""

    responses: int = 0
    tokens: int = 0  # of all responses
    seconds: float = 0.0  # excluding reward computation

    def columns(self) -> dict[str, Any]:
        """Metrics columns: totals over all ranks, and the mean time per rank."""
        responses, tokens, seconds = collectives.total(self)
        seconds /= ranks()
        return {
            "sampled_responses": int(responses),
            "sampled_tokens": int(tokens),
            "sampling_seconds": seconds,
            "responses_per_second": responses / seconds if seconds else None,
        }


@dataclass
class Rollouts:
    """One rank's rollouts for one optimizer step, or for several if they are reused."""

    rows: list[Row]
    """Training rows; `Row.sequence` is the index in this list."""
    rewards: list[float]
    """Rewards of all scored rollouts, including those that are not trained on."""
    drawn: SamplingStats
    """Amount and duration of the sampling."""
    old_logps: list[Tensor] = field(default_factory=list)
    """Log-probs of the sampling policy, one tensor of response tokens per row; empty: on-policy."""


class Sample(NamedTuple):
    """One rollout of one prompt."""

    given: tuple[int, ...]  # demonstration prefix before the response
    response: tuple[int, ...]
    reward: float  # nan: dropped
    learns_given: bool


def scatter_logps(logps: Sequence[Tensor], rows: Sequence[Row], batch: Batch) -> Tensor:
    """Scatter each row's response log-probs into a tensor shaped like `batch.targets`."""
    out = torch.zeros(batch.targets.numel())
    for set_step, row, values in zip(batch.starts, rows, logps, strict=True):
        out[row.scored(set_step)] = values
    return out.view(batch.targets.shape).to(batch.targets.device)


class Sampler:
    """Samples and scores rollouts as the method's plan requires: turns examples into training rows."""

    def __init__(
        self,
        config: RolloutConfig,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        reward: Any,
        plan: Sampling,
        credit: Crediting,
    ) -> None:
        self.config, self.engine, self.tokenizer, self.reward = config, engine, tokenizer, reward
        self.plan, self.credit = plan, credit
        self.drawn = SamplingStats()
        self.stages = plan.stages or (Stage(config.completions),)

    def __call__(self, model: nn.Module, examples: Sequence[Example], step: int = 0) -> Rollouts:
        """Rollouts of Q examples, with their demonstrations if the method trains on them."""
        self.reward.set_step(step)
        began = time.perf_counter()
        policy = self.engine(model)
        self.drawn = SamplingStats(seconds=time.perf_counter() - began)
        params: list[list[Sample]] = [[] for _ in examples]
        for stage in self.stages:
            self._draw(policy, examples, stage, params)
        rewards = torch.tensor([[d.reward for d in drawn] for drawn in params], dtype=torch.float64)
        demos = self._demo_rewards(examples) if self.plan.demo_in_group else None
        credit = self.credit(rewards, demos, self.plan.advantages or self.config.advantages)
        rows: list[Row] = []
        for unit, (example, drawn, *share) in enumerate(
            zip(examples, params, *(part.tolist() for part in credit), strict=True)
        ):
            mine = _pair(example, drawn) if self.plan.pairs else self._rows(example, drawn, *share)
            # numbered as in a single process, so that ids are unique across ranks
            unit = unit * ranks() + rank()
            rows += [row._replace(unit=unit, sequence=i) for i, row in enumerate(mine, len(rows))]
        sampled = [d.reward for drawn in params for d in drawn if d.response]
        return Rollouts(rows, [r for r in sampled if not math.isnan(r)], self.drawn)

    def _draw(
        self, policy: Policy, examples: Sequence[Example], stage: Stage, params: list[list[Sample]]
    ) -> None:
        """Sample one stage and append it to each prompt's rollouts."""
        given = [_given(e, d, stage) for e, d in zip(examples, params, strict=True)]
        # a complete demonstration needs no continuation; one is sampled anyway, so that every rank
        # samples the same number of prompts, and then discarded
        whole = [bool(g) and g == e.demo for g, e in zip(given, examples, strict=True)]
        starts = [
            e.prompt + (g[:-1] if w else g) for e, g, w in zip(examples, given, whole, strict=True)
        ]
        began = time.perf_counter()
        responses = policy(starts, stage.size)
        more = len(responses), sum(map(len, responses)), time.perf_counter() - began
        self.drawn = SamplingStats(*map(operator.add, self.drawn, more))
        owners = [q for q in range(len(examples)) for _ in range(stage.size)]
        responses = [() if whole[q] else r for q, r in zip(owners, responses, strict=True)]
        full = [given[q] + r for q, r in zip(owners, responses, strict=True)]
        scores = self._scores(full, [examples[q] for q in owners])
        for i, (q, response, score) in enumerate(zip(owners, responses, scores, strict=True)):
            learns = i % stage.size >= stage.size - stage.trained
            params[q].append(Sample(given[q], response, score, learns))

    def _scores(self, responses: list[tuple[int, ...]], examples: list[Example]) -> list[float]:
        """One reward per response; nan if the response was dropped."""
        texts = self.tokenizer.batch_decode([list(r) for r in responses], skip_special_tokens=True)
        return [math.nan if s is None else s for s in self.reward(texts, examples)]

    def _demo_rewards(self, examples: Sequence[Example]) -> Tensor:
        """[Q] rewards of the prompts' own demonstrations; nan where there is none to score."""
        out = torch.full((len(examples),), math.nan, dtype=torch.float64)
        own = [(q, e) for q, e in enumerate(examples) if e.demo is not None]
        if own:
            scores = self._scores([e.demo or () for _, e in own], [e for _, e in own])
            out[[q for q, _ in own]] = torch.tensor(scores, dtype=out.dtype)
        return out

    def _rows(
        self,
        example: Example,
        drawn: list[Sample],
        advantages: list[float],
        demo_advantage: float,
        keep: float,
        show: float,
    ) -> list[Row]:
        """Training rows of a prompt: its rollouts, and its demonstration if the method trains on
        it.
        """
        prompt, rows = example.prompt, []
        if self.plan.demos != "prompt" or example.demo is None:
            keep, show = 1.0, 0.0
        for draw, advantage in zip(drawn, advantages, strict=True):
            switch = len(prompt) + len(draw.given)
            start = len(prompt) if draw.learns_given else switch
            ids = prompt + draw.given + draw.response
            if keep and not math.isnan(draw.reward) and start < len(ids):
                shown = not draw.response  # the whole response is a demonstration
                rows.append(Row(ids, start, shown, advantage, weight=keep, switch=switch))
        if show and not any(stage.prefix for stage in self.stages):  # prefixes already contain it
            row = demo_row(example, self.plan.demo_tokens)
            rows.append(row._replace(advantage=demo_advantage, weight=show))
        return rows


def _given(example: Example, drawn: Sequence[Sample], stage: Stage) -> tuple[int, ...]:
    """The demonstration prefix that a stage gives, depending on the rewards so far."""
    rewards = [d.reward for d in drawn if not math.isnan(d.reward)]
    mean = sum(rewards) / len(rewards) if rewards else -math.inf
    if not stage.prefix or example.demo is None or mean >= stage.below:
        return ()
    return example.demo[: math.ceil(stage.prefix * len(example.demo))]


def _pair(example: Example, drawn: list[Sample]) -> list[Row]:
    """Rows of the best and the worst response (the first of each), if their rewards differ."""
    scored = [d for d in drawn if not math.isnan(d.reward)]
    best, worst = (pick(scored, key=lambda d: d.reward, default=None) for pick in (max, min))
    if best is None or worst is None or best.reward == worst.reward:
        return []
    start = len(example.prompt)
    return [
        Row(example.prompt + d.response, start, False, sign)
        for d, sign in ((best, 1.0), (worst, -1.0))
    ]
