"""One evaluation task: a model's answers to held-out prompts, and their summary.

Notation: Q prompts, K samples per prompt.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gac.collectives import gather, rank, world_size
from gac.data import Example
from gac.errors import ConfigError
from gac.parallel import seeds
from gac.rollouts.engines import Engine, RolloutFunction
from gac.rollouts.generation import SamplingParams, stop_tokens
from gac.rollouts.scoring import is_truncated, score
from gac.types import Rollout

from .config import EvalTask
from .estimates import accuracy_interval, bootstrap_interval, pass_at_k
from .progress import Progress


class Answer(NamedTuple):
    """One response to one prompt."""

    number: int
    """Index of the prompt in the data."""
    id: str
    row: str
    """Hash of the row's prompt, before any template: only equal ones of two results are compared.
    """
    split: str | None
    prompt: str
    """The prompt as the model reads it, with special tokens."""
    reference: str | None
    """The row's reference answer."""
    response: str
    length: int
    """Length in tokens, including the stop token."""
    score: float | None
    """The reward; None if the reward dropped the row."""
    truncated: bool
    """Whether the length limit cut it off."""


def generate_answers(
    engine: Engine,
    examples: Sequence[Example],
    reward: Any,
    task: EvalTask,
    seed: int,
    progress: Progress | None = None,
) -> list[Answer]:
    """Generate and score Q x K answers, in the order of the examples; returned on every rank.

    Each batch has its own seed, so the answers do not depend on the number of processes. The global
    RNG state is left unchanged.

    progress: keeps each finished batch, and has those of earlier runs.
    """
    function = engine.function
    if task.function is not None:
        function = RolloutFunction(task.function, "function")
    params = SamplingParams(
        task.max_completion_length, task.temperature, task.top_p, stop=task.stop
    )
    engine = engine.for_evaluation(params, function)
    per_call = max((task.batch or len(examples) * task.samples) // task.samples, 1)
    known = {} if progress is None else progress.batches
    answers = [Answer(*values) for batch in known.values() for values in batch]
    if progress is not None:
        progress.start(len(examples), len({answer.number for answer in answers}))
    starts = [i for i in range(0, len(examples), per_call) if i not in known]
    own = starts[rank() :: world_size()]

    def sample() -> list[Answer]:
        found: list[Answer] = []
        for finished, start in enumerate(own, 1):
            numbers = range(start, min(start + per_call, len(examples)))
            seeds.seed(seeds.derive_seed(seed, start))
            rollouts = engine.sample_rollouts([examples[i] for i in numbers], task.samples)
            owners = [i for i in numbers for _ in range(task.samples)]
            before = reward.counts() if progress else {}
            batch = _score(
                engine,
                examples=examples,
                owners=owners,
                rollouts=rollouts,
                reward=reward,
                task=task,
            )
            found += batch
            if progress is not None:
                counts = {k: n - before.get(k, 0) for k, n in reward.counts().items()}
                progress.add(start, batch, counts)
                done = len(examples) - (len(own) - finished) * world_size() * per_call
                progress.show(finished, len(own), done, len(examples))
        return found

    with torch.random.fork_rng():
        new = engine.independently(sample)
    return sorted(
        [*answers, *(a for rank_answers in gather(new) for a in rank_answers)],
        key=lambda a: a.number,
    )


def _score(
    engine: Engine,
    examples: Sequence[Example],
    owners: Sequence[int],
    rollouts: Sequence[Rollout],
    reward: Any,
    task: EvalTask,
) -> list[Answer]:
    """Score the rollouts of one batch; rollout i belongs to the example `owners[i]`."""
    tokenizer, field = engine.tokenizer, task.data.prompt_field
    stops = set(stop_tokens(tokenizer, task.stop))
    truncated = [is_truncated(r, stops, task.max_completion_length) for r in rollouts]
    scores = score(
        reward,
        tokenizer,
        examples=[examples[i] for i in owners],
        rollouts=rollouts,
        truncated=truncated,
    )
    return [
        Answer(
            number=i,
            id=examples[i].id,
            row=hashlib.sha256(repr(examples[i].extra.get(field)).encode()).hexdigest()[:16],
            split=split_of(task, examples[i]),
            prompt=str(tokenizer.decode(list(examples[i].prompt), skip_special_tokens=False)),
            reference=examples[i].answer,
            response=text,
            length=len(rollout.completion_ids),
            score=value,
            truncated=cut,
        )
        for i, text, rollout, value, cut in zip(
            owners, scores.texts, rollouts, scores.rewards, truncated, strict=True
        )
    ]


def summary(answers: Sequence[Answer], task: EvalTask, nll: float | None = None) -> dict[str, Any]:
    """Summarize the answers of a task; values without any measurement are None.

    Keys: accuracy, ci95, pass_at, prompts, samples, truncated, response_length, dropped, demo_nll,
    splits.

    nll: the loss of the demonstrations, see `demo_nll`.
    """
    scored = [a for a in answers if a.score is not None]
    by_prompt = _scores_by_prompt(scored)
    passed = {
        str(k): _mean(
            [
                pass_at_k(len(s), sum(x >= 1 for x in s), k)
                for s in by_prompt.values()
                if len(s) >= k
            ]
        )
        for k in task.pass_at
    }
    splits = {a.split: None for a in answers if a.split is not None}
    return {
        **_accuracy(answers),
        "pass_at": passed,
        "samples": task.samples,
        "truncated": _mean([a.truncated for a in answers]),
        "response_length": _mean([a.length for a in answers]),
        "dropped": len(answers) - len(scored),
        "demo_nll": nll,
        "splits": {name: _accuracy([a for a in answers if a.split == name]) for name in splits},
    }


def prompt_means(answers: Sequence[Answer]) -> dict[tuple[str, str], float]:
    """The mean score of each prompt with at least one score, by its id and hash."""
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for a in answers:
        if a.score is not None:
            scores[a.id, a.row].append(a.score)
    return {key: sum(s) / len(s) for key, s in scores.items()}


def _accuracy(answers: Sequence[Answer]) -> dict[str, Any]:
    scored = _scores_by_prompt([a for a in answers if a.score is not None])
    means = [sum(s) / len(s) for s in scored.values()]
    in_unit_interval = all(0 <= m <= 1 for m in means)
    interval = accuracy_interval(means) if in_unit_interval else bootstrap_interval(means)
    return {
        "accuracy": _mean(means),
        "ci95": list(interval) if math.isfinite(sum(interval)) else None,
        "prompts": len(means),
    }


def _scores_by_prompt(scored: Sequence[Answer]) -> dict[int, list[float]]:
    scores: dict[int, list[float]] = defaultdict(list)
    for a in scored:
        assert a.score is not None  # filtered by the caller
        scores[a.number].append(a.score)
    return scores


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def split_of(task: EvalTask, example: Example) -> str | None:
    """The example's value of `split_field`. Raises ConfigError if the row lacks it."""
    if task.split_field is None:
        return None
    if task.split_field not in example.extra:
        raise ConfigError(
            f"split_field={task.split_field!r} is not among the fields of row "
            f"{example.id!r}: {', '.join(example.extra) or 'none'}"
        )
    return str(example.extra[task.split_field])
