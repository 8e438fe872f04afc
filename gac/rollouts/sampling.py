"""The rollouts of one step: prompts, completions, rewards, advantages, training rows.

Notation: Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac import collectives
from gac.collectives import rank, world_size
from gac.data import Example
from gac.data.micro_batches import demo_row
from gac.rewards.completion import Decoder
from gac.rows import Row
from gac.types import Credit, Rollout, Sampling, Stage

from .config import RolloutConfig
from .engines import Engine
from .equal_rewards import EqualRewardWarning
from .generation import stop_tokens
from .samples import Sample, is_flat, pair_of, prefix_of, row_of, scored, turns_of
from .scoring import Scores, is_truncated, score
from .stats import Rollouts, SamplingStats

logger = logging.getLogger(__name__)
Crediting = Callable[[Tensor, Tensor | None, str], Credit]  # see `group_credit`


class Sampler:
    """Samples rollouts as the method's plan says, scores them and turns them into training rows."""

    def __init__(
        self,
        config: RolloutConfig,
        engine: Engine,
        *,
        tokenizer: PreTrainedTokenizerBase,
        reward: Any,
        plan: Sampling,
        credit: Crediting,
        more: Callable[[int], Sequence[Example]],
        demos: bool,
        seed: int,
    ) -> None:
        """`more(n)` returns this rank's next n prompts, for resampling; all ranks call `more`.

        demos: whether the run also trains on demonstrations.
        seed: the run's.
        """
        self.config, self.engine, self.tokenizer, self.reward = config, engine, tokenizer, reward
        self.plan, self.credit, self.more, self.seed = plan, credit, more, seed
        self.stages = plan.stages or (Stage(config.num_generations),)
        self.rank, self.ranks, self.has_prefix = rank(), world_size(), plan.has_prefix
        self.stops = set(stop_tokens(tokenizer, config.stop))
        self.samples: list[dict[str, Any]] = []
        """The first prompts of the last step, with completions and rewards, for people to read."""
        self.equal_rewards = EqualRewardWarning(demos, plan.demos == "separate")
        if config.top_p < 1 and self.rank == 0:
            logger.warning(
                "rollouts.top_p=%g: rollouts come from a truncated distribution, but the loss uses "
                "the probabilities of the full distribution, so the gradient and the importance "
                "ratio are biased; use top_p=1 unless you need truncated sampling",
                config.top_p,
            )

    def __call__(self, model: nn.Module, examples: Sequence[Example], step: int) -> Rollouts:
        """Rollouts of Q examples, with their demonstrations if the method trains on them."""
        self.step, self.stats = step, SamplingStats()
        self.means: collectives.Sums = {}
        self.scored: list[tuple[str, float]] = []  # source and reward, also of replaced prompts
        examples, groups = self._groups(list(examples), model)
        self.samples = [
            self._readable(example, group)
            for example, group in list(zip(examples, groups, strict=True))[
                : self.config.log_sample_prompts
            ]
        ]
        for source, reward in self.scored:
            if source:
                collectives.add_sums(self.means, {f"reward_mean/{source}": (reward, 1)})
        all_scored = [reward for _, reward in self.scored]
        self.equal_rewards.update(self.stats, all_scored)
        columns = self.stats.columns()
        rewards = torch.tensor([[s.reward for s in g] for g in groups], dtype=torch.float64)
        demos = self._demo_rewards(examples) if self.plan.demo_in_group else None
        credit = self._credit(rewards, demos)
        rows: list[Row] = []
        for i, (example, group) in enumerate(zip(examples, groups, strict=True)):
            if self.plan.pairs:
                own = pair_of(group)
            else:
                own = self._rows(example, group, Credit(*(values[i] for values in credit)))
            # numbered as in a single process, so that ids are unique across ranks
            unit = i * self.ranks + self.rank
            rows += [row._replace(unit=unit, sequence=n) for n, row in enumerate(own, len(rows))]
        rollouts = Rollouts(rows, rewards=all_scored, step=step, columns=columns, means=self.means)
        if self.plan.collect:
            weights = zip(examples, credit.demo_weight.tolist(), strict=True)
            rollouts.collected = [e if weight and e.demo else None for e, weight in weights]
        return rollouts

    def _credit(self, rewards: Tensor, demos: Tensor | None) -> Credit:
        """This rank's part of the credit, which the method assigns to the prompts of all ranks."""
        scale = self.plan.advantages or self.config.scale_rewards
        tables = collectives.gather((rewards, demos))
        ranks, own = len(tables), collectives.rank()
        # in the order of a single process: prompt i of every rank, then prompt i + 1
        all_rewards = torch.stack([own_rewards for own_rewards, _ in tables], 1).flatten(0, 1)
        all_demos = None
        if demos is not None:
            all_demos = torch.stack([own_demos for _, own_demos in tables], 1).flatten()
        credit = self.credit(all_rewards, all_demos, scale)
        return Credit(*(values[own::ranks] for values in credit))

    def _groups(
        self, examples: list[Example], model: nn.Module
    ) -> tuple[list[Example], list[list[Sample]]]:
        """Sample all groups, then replace those with equal rewards by groups of new prompts."""
        groups = self._sample_all(examples, model)
        flat = [i for i, group in enumerate(groups) if is_flat(group)]
        several = [rewards for group in groups if len(rewards := scored(group)) > 1]
        self.stats = self.stats._replace(
            groups=len(several),
            flat_groups=len(flat),
            solved=sum(min(rewards) >= 1 for rewards in several),
            unsolved=sum(max(rewards) < 1 for rewards in several),
        )
        for _ in range(self.config.dynamic_sampling_retries):
            if not collectives.largest([len(flat)])[0]:
                break
            new = list(self.more(len(flat)))
            for i, example, group in zip(flat, new, self._sample_all(new), strict=True):
                examples[i], groups[i] = example, group
            self.stats = self.stats._replace(resampled=self.stats.resampled + len(new))
            flat = [i for i in flat if is_flat(groups[i])]
        return examples, groups

    def _sample_all(
        self, examples: Sequence[Example], model: nn.Module | None = None
    ) -> list[list[Sample]]:
        """Sample all stages, with the weights of `model`, or with those of the last call."""
        groups: list[list[Sample]] = [[] for _ in examples]
        for number, stage in enumerate(self.stages):
            self._sample(examples, stage, groups, None if number else model)
        for example, group in zip(examples, groups, strict=True):
            self.scored += [(example.source, reward) for reward in scored(group)]
        return groups

    def _readable(self, example: Example, group: Sequence[Sample]) -> dict[str, Any]:
        text = Decoder(self.tokenizer)
        return {
            "id": example.id,
            "prompt": example.prompt_text,
            "completions": [
                {
                    "text": text(sample.prefix + sample.completion),
                    "reward": None if math.isnan(sample.reward) else sample.reward,
                    "truncated": sample.truncated,
                    **({"turns": turns_of(sample, text)} if sample.mask else {}),
                }
                for sample in group
            ],
            "demonstration": example.demo and text(example.demo),
        }

    def _sample(
        self,
        examples: Sequence[Example],
        stage: Stage,
        groups: list[list[Sample]],
        model: nn.Module | None,
    ) -> None:
        """Sample one stage and append it to each prompt's group."""
        pairs = zip(examples, groups, strict=True)
        prefixes = [prefix_of(*pair, stage, self.step, self.seed) for pair in pairs]
        # a complete demonstration needs no continuation; one is sampled anyway, so that every rank
        # samples the same number of prompts, and then discarded
        complete = [bool(p) and p == e.demo for p, e in zip(prefixes, examples, strict=True)]
        starts = [
            replace(example, prompt=example.prompt + (prefix[:-1] if done else prefix))
            if prefix
            else example
            for example, prefix, done in zip(examples, prefixes, complete, strict=True)
        ]
        began = time.perf_counter()
        if model is not None:
            self.engine.load(model)
        rollouts = self.engine.roll_out(starts, stage.size)
        seconds = time.perf_counter() - began
        owners = [q for q in range(len(examples)) for _ in range(stage.size)]
        full = [
            replace(
                rollout,
                completion_ids=prefixes[q] + (() if complete[q] else tuple(rollout.completion_ids)),
            )
            if prefixes[q]
            else rollout
            for q, rollout in zip(owners, rollouts, strict=True)
        ]
        began = time.perf_counter()
        limit = self.config.max_completion_length
        cut = [
            not complete[q] and is_truncated(rollout, self.stops, limit)
            for q, rollout in zip(owners, rollouts, strict=True)
        ]
        scores = self._score([examples[q] for q in owners], full, cut)
        reward_seconds = time.perf_counter() - began
        for name, values in scores.terms.items():
            known = [value for value in values if not math.isnan(value)]
            collectives.add_sums(self.means, {f"reward/{name}": (math.fsum(known), len(known))})
        tokens, truncated = 0, 0
        for i, (q, rollout, reward) in enumerate(
            zip(owners, rollouts, scores.numbers(), strict=True)
        ):
            mask = rollout.loss_mask
            tokens += sum(mask) if len(mask) else len(rollout.completion_ids)
            completion = () if complete[q] else tuple(rollout.completion_ids)
            sample = Sample(
                prompt=examples[q].prompt if prefixes[q] else tuple(rollout.prompt_ids),
                prefix=prefixes[q],
                completion=completion,
                reward=reward - self._penalty(completion),
                train_prefix=i % stage.size >= stage.size - stage.trained,
                truncated=cut[i],
                mask=() if complete[q] else tuple(map(bool, mask)),
                logps=() if complete[q] else tuple(rollout.logps or ()),
            )
            truncated += sample.truncated
            groups[q].append(sample)
        sampled = SamplingStats(
            completions=len(rollouts),
            tokens=tokens,
            seconds=seconds,
            reward_seconds=reward_seconds,
            truncated=truncated,
        )
        self.stats = SamplingStats(*map(operator.add, self.stats, sampled))

    def _penalty(self, completion: tuple[int, ...]) -> float:
        """Soft overlong punishment: grows from 0 in the last `overlong_tokens` before the limit."""
        tokens = self.config.overlong_tokens
        if tokens is None:
            return 0.0
        over = len(completion) - (self.config.max_completion_length - tokens)
        return self.config.overlong_penalty * min(max(over / tokens, 0.0), 1.0)

    def _score(
        self, examples: Sequence[Example], rollouts: Sequence[Rollout], truncated: Sequence[bool]
    ) -> Scores:
        return score(
            self.reward,
            self.tokenizer,
            examples=examples,
            rollouts=rollouts,
            truncated=truncated,
            step=self.step,
        )

    def _demo_rewards(self, examples: Sequence[Example]) -> Tensor:
        """[Q] rewards of the prompts' own demonstrations; nan where there is none to score."""
        out = torch.full((len(examples),), math.nan, dtype=torch.float64)
        own = [q for q, e in enumerate(examples) if e.demo is not None]
        demos = [Rollout(e.prompt, e.demo, ()) for e in examples if e.demo is not None]
        scores = self._score([examples[q] for q in own], demos, [False] * len(demos)).numbers()
        out[own] = torch.tensor(scores, dtype=out.dtype)
        return out

    def _rows(self, example: Example, group: list[Sample], credit: Credit) -> list[Row]:
        """Rows of a prompt's rollouts, and of its demonstration if the method trains on it.

        credit: the credit of this prompt, without the dimension [Q].
        """
        rows = []
        rollout_weight, demo_weight = credit.rollout_weight.item(), credit.demo_weight.item()
        if self.plan.demos != "prompt" or example.demo is None:
            rollout_weight, demo_weight = 1.0, 0.0
        for sample, advantage in zip(group, credit.rollouts.tolist(), strict=True):
            row = row_of(sample, advantage)._replace(weight=rollout_weight, source=example.source)
            skipped = math.isnan(sample.reward) or (
                sample.truncated and self.config.mask_truncated_completions
            )
            if rollout_weight and not skipped and row.loss_tokens:
                if self.plan.teacher and example.demo is not None:
                    row = row._replace(context=example.prompt + example.demo)
                rows.append(row)
        if self.plan.groups and len(rows) < len(group):
            rows = []
        # prefixes already contain the demonstration
        if demo_weight and not self.has_prefix and not self.plan.collect:
            row = demo_row(example, self.plan.demo_tokens)
            rows.append(row._replace(advantage=credit.demos.item(), weight=demo_weight))
        return rows
