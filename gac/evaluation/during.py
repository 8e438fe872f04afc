"""Evaluation during training: tasks are loaded once and evaluated repeatedly."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from gac.errors import ConfigError
from gac.rewards import Reward
from gac.rollouts.engines import Engine

from .config import EvalSettings
from .suite import Job, flat, load_jobs
from .task import generate_answers, split_of


class Evaluator:
    """Evaluates a run's tasks. Falsy if there are none.

    Args:
        settings: the tasks.
        engine: samples the answers.
        reward: the run's reward, used for tasks that do not set their own.
        seed: sampling seed.
    """

    def __init__(self, settings: EvalSettings, engine: Engine, reward: Reward, seed: int) -> None:
        tasks = {"": settings, **settings.tasks} if settings.data.prompts else settings.tasks
        self.jobs = load_jobs(tasks, engine.tokenizer, reward)
        _check_column_names(self.jobs)
        self.engine, self.seed = engine, seed

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """Evaluate all tasks and return a row of eval.jsonl.

        Its columns are accuracy, accuracy/<split or task>, response_length and seconds.
        """
        started = time.perf_counter()
        row: dict[str, Any] = {}
        self.engine.load(model)
        for name, job in self.jobs.items():
            answers = generate_answers(self.engine, job.examples, job.reward, job.task, self.seed)
            row |= flat(answers, job.task, name)
        return {**row, "seconds": time.perf_counter() - started}

    def close(self) -> None:
        """Release the rewards' resources."""
        for job in self.jobs.values():
            job.reward.close()


def _check_column_names(jobs: Mapping[str, Job]) -> None:
    """Raise ConfigError if two tasks or splits would have the same column name."""
    first = jobs.get("")
    if first is None:
        return
    for split in dict.fromkeys(split_of(first.task, example) for example in first.examples):
        name = (split or "").partition("/")[0]
        if name and name in jobs:
            raise ConfigError(
                f"tasks.{name}: the name conflicts with split {split!r} of the first task "
                f"(split_field={first.task.split_field!r}), whose column is accuracy/{split}; "
                f"rename tasks.{name}"
            )
