"""The rollouts of one step: prompts, completions, rewards, advantages, training rows.

Notation: Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import random
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac import collectives
from gac.collectives import rank, world_size
from gac.data import Example
from gac.data.micro_batches import demo_row
from gac.rows import Row
from gac.types import Credit, Rollout, Sampling, Stage

from .config import RolloutConfig
from .engines import Engine
from .generation import stop_tokens

logger = logging.getLogger(__name__)
Crediting = Callable[[Tensor, Tensor | None, str], Credit]  # see `group_credit`


class SamplingStats(NamedTuple):
    """Amount and duration of this rank's sampling."""

    completions: int = 0
    tokens: int = 0  # sampled, of all completions
    seconds: float = 0.0  # excluding reward computation
    reward_seconds: float = 0.0
    groups: int = 0  # prompts with at least two scored rollouts
    flat_groups: int = 0  # groups whose rewards are all equal, before any resampling
    resampled: int = 0  # prompts that were replaced
    truncated: int = 0  # completions without a stop token
    solved: int = 0  # groups in which every reward is at least 1
    unsolved: int = 0  # groups in which no reward is

    def columns(self) -> dict[str, Any]:
        """Metrics columns over all ranks; times are means per rank. Every rank must call it."""
        all_ranks = SamplingStats._make(collectives.total(self))
        completions, groups = all_ranks.completions, all_ranks.groups
        seconds = all_ranks.seconds / world_size()
        return {
            "sampled_completions": int(completions),
            "sampled_tokens": int(all_ranks.tokens),
            "sampling_seconds": seconds,
            "completions_per_second": completions / seconds if seconds else None,
            "reward_seconds": all_ranks.reward_seconds / world_size(),
            "frac_reward_zero_std": all_ranks.flat_groups / groups if groups else None,
            "frac_solved": all_ranks.solved / groups if groups else None,
            "frac_unsolved": all_ranks.unsolved / groups if groups else None,
            "resampled_prompts": int(all_ranks.resampled),
            "completions/clipped_ratio": all_ranks.truncated / completions if completions else None,
            "completions/mean_length": all_ranks.tokens / completions if completions else None,
        }


@dataclass
class Rollouts:
    """One rank's rollouts for one optimizer step, or for several if they are reused."""

    rows: list[Row]
    """Training rows; `Row.sequence` is the index in this list."""
    rewards: list[float]
    """Rewards of all scored rollouts, including those that are not trained on."""
    step: int
    """The step that sampled them, from 0."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Metrics columns of the sampling, over all ranks."""
    means: collectives.Sums = field(default_factory=dict)
    """Metrics column -> sum and number: the mean reward of each data source, and of each term."""
    old_logps: list[Tensor] = field(default_factory=list)
    """Log-probs of the sampling policy, one tensor of loss tokens per row; empty: on-policy."""
    teacher_logps: list[Tensor] = field(default_factory=list)
    """Like `old_logps`, but of the policy that sees `Row.context`; nan without a context, and empty
    if not measured.
    """
    collected: list[Example | None] = field(default_factory=list)
    """For each prompt, its example if the demonstration is to be collected, else None; empty
    without `Sampling.collect`."""


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


def _scored(group: Sequence[Sample]) -> list[float]:
    """Rewards of the samples of a group that have a completion and were not dropped."""
    return [s.reward for s in group if s.completion and not math.isnan(s.reward)]


def is_flat(group: Sequence[Sample]) -> bool:
    """Whether all rewards of a group of at least two are equal, so that all advantages are 0."""
    rewards = _scored(group)
    return len(rewards) > 1 and min(rewards) == max(rewards)


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
        check = "check the reward with `gac rewards check` and on samples.jsonl"
        if self.lowest < self.highest:
            return (
                "all rollouts of each prompt have had the same reward, so they teach nothing: "
                "choose prompts of another difficulty, "
                f"{'set rollouts.dynamic_sampling_retries, ' * self.resampling}or {check}"
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


def is_truncated(rollout: Rollout, stops: Container[int], limit: int) -> bool:
    """Whether a limit ended the completion; its last turn may be the environment's."""
    ids, mask = rollout.completion_ids, rollout.loss_mask
    if ids[-1] in stops:
        return False
    return not len(mask) or bool(mask[-1]) or len(ids) >= limit


def score(
    reward: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    rollouts: Sequence[Rollout],
    step: int | None = None,
) -> tuple[list[str], list[float | None]]:
    """Texts and rewards of the rollouts of `examples`, one each; a reward is None if dropped.

    The configured `reward` scores the rollouts that have no reward of their own; `step` is the
    optimizer step, for a reward that depends on it.
    """
    if step is not None:
        reward.set_step(step)
    # one by one: an empty batch would decode to one empty string
    texts = [
        str(tokenizer.decode(list(r.completion_ids), skip_special_tokens=True)) for r in rollouts
    ]
    scores = [None if r.reward is None else float(r.reward) for r in rollouts]
    rows = [i for i, s in enumerate(scores) if s is None]
    extended = [
        replace(examples[i], extra={**examples[i].extra, **rollouts[i].extra})
        if rollouts[i].extra
        else examples[i]
        for i in rows
    ]
    if rows:
        values = reward([texts[i] for i in rows], extended)
        for i, value in zip(rows, values, strict=True):
            scores[i] = value
    return texts, scores


class Sampler:
    """Samples rollouts as the method's plan says, scores them and turns them into training rows."""

    def __init__(
        self,
        config: RolloutConfig,
        engine: Engine,
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
                own = _pair(group)
            else:
                own = self._rows(example, group, Credit(*(values[i] for values in credit)))
            # numbered as in a single process, so that ids are unique across ranks
            unit = i * self.ranks + self.rank
            rows += [row._replace(unit=unit, sequence=n) for n, row in enumerate(own, len(rows))]
        rollouts = Rollouts(rows, all_scored, step, columns, self.means)
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
        several = [rewards for group in groups if len(rewards := _scored(group)) > 1]
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
            self.scored += [(example.source, reward) for reward in _scored(group)]
        return groups

    def _readable(self, example: Example, group: Sequence[Sample]) -> dict[str, Any]:
        def text(tokens: Sequence[int]) -> str:
            return cast("str", self.tokenizer.decode(list(tokens), skip_special_tokens=True))

        return {
            "id": example.id,
            "prompt": example.prompt_text,
            "completions": [
                {
                    "text": text(sample.prefix + sample.completion),
                    "reward": None if math.isnan(sample.reward) else sample.reward,
                    "truncated": sample.truncated,
                    **({"turns": _turns(sample, text)} if sample.mask else {}),
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
        prefixes = [_prefix(*pair, stage, self.step, self.seed) for pair in pairs]
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
        self.reward.terms = {}
        scores = self._scores([examples[q] for q in owners], full)
        reward_seconds = time.perf_counter() - began
        for name, values in self.reward.terms.items():
            known = [value for value in values if not math.isnan(value)]
            collectives.add_sums(self.means, {f"reward/{name}": (math.fsum(known), len(known))})
        tokens, truncated, limit = 0, 0, self.config.max_completion_length
        for i, (q, rollout, reward) in enumerate(zip(owners, rollouts, scores, strict=True)):
            mask = rollout.loss_mask
            tokens += sum(mask) if len(mask) else len(rollout.completion_ids)
            completion = () if complete[q] else tuple(rollout.completion_ids)
            sample = Sample(
                examples[q].prompt if prefixes[q] else tuple(rollout.prompt_ids),
                prefixes[q],
                completion,
                reward - self._penalty(completion),
                i % stage.size >= stage.size - stage.trained,
                bool(completion) and is_truncated(rollout, self.stops, limit),
                () if complete[q] else tuple(map(bool, mask)),
                () if complete[q] else tuple(rollout.logps or ()),
            )
            truncated += sample.truncated
            groups[q].append(sample)
        sampled = SamplingStats(len(rollouts), tokens, seconds, reward_seconds, truncated=truncated)
        self.stats = SamplingStats(*map(operator.add, self.stats, sampled))

    def _penalty(self, completion: tuple[int, ...]) -> float:
        """Soft overlong punishment: grows from 0 in the last `overlong_tokens` before the limit."""
        tokens = self.config.overlong_tokens
        if tokens is None:
            return 0.0
        over = len(completion) - (self.config.max_completion_length - tokens)
        return self.config.overlong_penalty * min(max(over / tokens, 0.0), 1.0)

    def _scores(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> list[float]:
        """One reward per rollout; nan if it was dropped."""
        _, scores = score(self.reward, self.tokenizer, examples, rollouts, self.step)
        return [math.nan if s is None else s for s in scores]

    def _demo_rewards(self, examples: Sequence[Example]) -> Tensor:
        """[Q] rewards of the prompts' own demonstrations; nan where there is none to score."""
        out = torch.full((len(examples),), math.nan, dtype=torch.float64)
        own = [q for q, e in enumerate(examples) if e.demo is not None]
        demos = [Rollout(e.prompt, e.demo, ()) for e in examples if e.demo is not None]
        scores = self._scores([examples[q] for q in own], demos)
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
            row = _row(sample, advantage)._replace(weight=rollout_weight, source=example.source)
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


def _prefix(
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


def _row(sample: Sample, advantage: float) -> Row:
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


def _turns(sample: Sample, text: Callable[[Sequence[int]], str]) -> list[list[Any]]:
    """[text, whether it has a loss] of each turn of a rollout."""
    pairs = zip(sample.completion, sample.mask, strict=True)
    turns = itertools.groupby(pairs, key=operator.itemgetter(1))
    return [[text([token for token, _ in turn]), learned] for learned, turn in turns]


def _pair(group: list[Sample]) -> list[Row]:
    """Rows of the best and the worst rollout, if their rewards differ; ties go to the first."""
    scored = [s for s in group if not math.isnan(s.reward)]
    if len({s.reward for s in scored}) < 2:
        return []
    best, worst = (pick(scored, key=lambda s: s.reward) for pick in (max, min))
    return [_row(best, 1.0), _row(worst, -1.0)]
