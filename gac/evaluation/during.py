"""Evaluation beside training: the tasks are read once, then asked again and again."""

from __future__ import annotations

import time
from typing import Any

from torch import nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.rewards import Reward

from .suite import flat, load_jobs
from .task import EvalSettings, answer


class Evaluator:
    """The tasks of a run; false when there is none.

    reward: the run's own, for tasks that name no other.
    """

    def __init__(
        self, settings: EvalSettings, tokenizer: PreTrainedTokenizerBase, reward: Reward, seed: int
    ) -> None:
        tasks = {"": settings, **settings.tasks} if settings.data.prompts else settings.tasks
        self.jobs = load_jobs(tasks, tokenizer, reward)
        self.tokenizer, self.seed = tokenizer, seed

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """A row of eval.jsonl: accuracy, accuracy/<split or task>, response_length, seconds."""
        started = time.perf_counter()
        row: dict[str, Any] = {}
        for name, job in self.jobs.items():
            answers = answer(model, self.tokenizer, job.examples, job.reward, job.task, self.seed)
            row |= flat(answers, job.task, name)
        return {**row, "seconds": time.perf_counter() - started}

    def close(self) -> None:
        """Give back what the rewards hold."""
        for job in self.jobs.values():
            job.reward.close()
