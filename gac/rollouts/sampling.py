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
from gac.parallel.collectives import rank, world_size

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
        seconds /= world_size()
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
    stats: SamplingStats
    """Amount and duration of the sampling."""
    old_logps: list[Tensor] = field(default_factory=list)
    """Log-probs of the sampling policy, one tensor of response tokens per row; empty: on-policy."""


class Sample(NamedTuple):
    """One rollout of one prompt."""

    prefix: tuple[int, ...]  # demonstration tokens given before the response
    response: tuple[int, ...]
    reward: float  # nan: dropped
    train_prefix: bool


def scatter_logps(logps: Sequence[Tensor], rows: Sequence[Row], batch: Batch) -> Tensor:
    """Scatter each row's response log-probs into a tensor shaped like `batch.targets`."""
    out = torch.zeros(batch.targets.numel())
    for offset, row, values in zip(batch.starts, rows, logps, strict=True):
        out[row.scored(offset)] = values
    return out.view(batch.targets.shape).to(batch.targets.device)


class Sampler:
    """Samples and scores rollouts by the method's plan, and turns them into training rows."""

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
        self.stats = SamplingStats()
        self.stages = plan.stages or (Stage(config.completions),)

    def __call__(self, model: nn.Module, examples: Sequence[Example], step: int = 0) -> Rollouts:
        """Rollouts of Q examples, with their demonstrations if the method trains on them."""
        self.reward.set_step(step)
        began = time.perf_counter()
        policy = self.engine(model)
        self.stats = SamplingStats(seconds=time.perf_counter() - began)
        groups: list[list[Sample]] = [[] for _ in examples]
        for stage in self.stages:
            self._sample(policy, examples, stage, groups)
        rewards = torch.tensor([[s.reward for s in g] for g in groups], dtype=torch.float64)
        demos = self._demo_rewards(examples) if self.plan.demo_in_group else None
        credit = self.credit(rewards, demos, self.plan.advantages or self.config.advantages)
        rows: list[Row] = []
        for i, (example, group) in enumerate(zip(examples, groups, strict=True)):
            if self.plan.pairs:
                own = _pair(example, group)
            else:
                own = self._rows(example, group, Credit(*(values[i] for values in credit)))
            # numbered as in a single process, so that ids are unique across ranks
            unit = i * world_size() + rank()
            rows += [row._replace(unit=unit, sequence=n) for n, row in enumerate(own, len(rows))]
        scored = [s.reward for group in groups for s in group if s.response]
        return Rollouts(rows, [r for r in scored if not math.isnan(r)], self.stats)

    def _sample(
        self, policy: Policy, examples: Sequence[Example], stage: Stage, groups: list[list[Sample]]
    ) -> None:
        """Sample one stage and append it to each prompt's group."""
        prefixes = [_prefix(e, g, stage) for e, g in zip(examples, groups, strict=True)]
        # a complete demonstration needs no continuation; one is sampled anyway, so that every rank
        # samples the same number of prompts, and then discarded
        complete = [bool(p) and p == e.demo for p, e in zip(prefixes, examples, strict=True)]
        starts = [
            example.prompt + (prefix[:-1] if done else prefix)
            for example, prefix, done in zip(examples, prefixes, complete, strict=True)
        ]
        began = time.perf_counter()
        responses = policy(starts, stage.size)
        stage_stats = len(responses), sum(map(len, responses)), time.perf_counter() - began
        self.stats = SamplingStats(*map(operator.add, self.stats, stage_stats))
        owners = [q for q in range(len(examples)) for _ in range(stage.size)]
        responses = [() if complete[q] else r for q, r in zip(owners, responses, strict=True)]
        full = [prefixes[q] + r for q, r in zip(owners, responses, strict=True)]
        scores = self._scores(full, [examples[q] for q in owners])
        for i, (q, response, score) in enumerate(zip(owners, responses, scores, strict=True)):
            train_prefix = i % stage.size >= stage.size - stage.trained
            groups[q].append(Sample(prefixes[q], response, score, train_prefix))

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

    def _rows(self, example: Example, group: list[Sample], credit: Credit) -> list[Row]:
        """Rows of a prompt's rollouts, and of its demonstration if the method trains on it.

        credit: that of this prompt, without the dimension [Q].
        """
        prompt, rows = example.prompt, []
        rollout_weight, demo_weight = credit.rollout_weight.item(), credit.demo_weight.item()
        if self.plan.demos != "prompt" or example.demo is None:
            rollout_weight, demo_weight = 1.0, 0.0
        for sample, advantage in zip(group, credit.rollouts.tolist(), strict=True):
            switch = len(prompt) + len(sample.prefix)
            start = len(prompt) if sample.train_prefix else switch
            ids = prompt + sample.prefix + sample.response
            if rollout_weight and not math.isnan(sample.reward) and start < len(ids):
                is_demo = not sample.response  # the prefix is the complete demonstration
                row = Row(ids, start, is_demo, advantage, weight=rollout_weight, switch=switch)
                rows.append(row)
        # prefixes already contain the demonstration
        if demo_weight and not any(stage.prefix for stage in self.stages):
            row = demo_row(example, self.plan.demo_tokens)
            rows.append(row._replace(advantage=credit.demos.item(), weight=demo_weight))
        return rows


def _prefix(example: Example, group: Sequence[Sample], stage: Stage) -> tuple[int, ...]:
    """The demonstration prefix that a stage gives, depending on the rewards so far."""
    rewards = [s.reward for s in group if not math.isnan(s.reward)]
    mean = sum(rewards) / len(rewards) if rewards else -math.inf
    if not stage.prefix or example.demo is None or mean >= stage.below:
        return ()
    return example.demo[: math.ceil(stage.prefix * len(example.demo))]


def _pair(example: Example, group: list[Sample]) -> list[Row]:
    """Rows of the best and the worst response (the first of each), if their rewards differ."""
    scored = [s for s in group if not math.isnan(s.reward)]
    best, worst = (pick(scored, key=lambda s: s.reward, default=None) for pick in (max, min))
    if best is None or worst is None or best.reward == worst.reward:
        return []
    start = len(example.prompt)
    return [
        Row(example.prompt + sample.response, start, False, sign)
        for sample, sign in ((best, 1.0), (worst, -1.0))
    ]
