"""The keys of `gac eval`, and of `eval` in training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gac.data import DataConfig
from gac.errors import require
from gac.fields import (
    Checked,
    Count,
    Natural,
    NonNegative,
    PositiveShare,
    check_effects,
    expand_paths,
    setting,
)
from gac.models.config import ModelConfig


def check_names(tasks: Iterable[str]) -> None:
    """Raise ValueError for a task name that would be ambiguous in a column or table."""
    for name in tasks:
        if not name or not name.isprintable() or name != name.strip() or "/" in name:
            raise ValueError(
                f"tasks.{name!r}: invalid task name; use printable characters other than '/', "
                "which separates a task from its split"
            )


@dataclass(frozen=True)
class EvalTask(Checked):
    """A dataset, its generation settings and its reward."""

    data: DataConfig = DataConfig()
    """Prompts and reference answers. If `data.prompts` is null, nothing is evaluated."""
    reward: Any = None
    """A name, a mapping or package.module:function; null: the configuration's top-level reward."""
    samples: Count = 1
    """Responses per prompt; accuracy is their mean (avg@k)."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0: greedy."""
    top_p: PositiveShare = setting(1.0, only_with="temperature")
    """Sample from the most likely tokens whose probabilities add up to this (nucleus sampling)."""
    max_completion_length: Count = 1024
    """Maximum response length in tokens."""
    stop: tuple[str, ...] = ()
    """Single-token strings that end a response, in addition to the EOS token."""
    batch: Count | None = 64
    """Responses per generation batch; null: all. Batches are distributed over processes."""
    split_field: str | None = None
    """Row field to split results by: accuracy is also reported for each of its values."""
    function: str | None = None
    """The task's own rollouts, as `rollouts.function`; null: `rollouts.function` in training, and
    one completion of each prompt in `gac eval`."""
    pass_at: tuple[int, ...] = ()
    """Values of k for pass@k, at most `samples`. A response is correct if its score is at least 1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for k in self.pass_at:
            require(1 <= k <= self.samples, "pass_at", k, f"1 to samples={self.samples}")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples={self.samples} at temperature=0 would all be equal: set temperature > 0"
            )
        check_effects(self)
        use = "the default: an evaluation reads the rows of data.prompts in their order"
        for name in (
            "sources",
            "demos",
            "demo_template",
            "max_demo_tokens",
            "order",
            "source_field",
        ):
            value = getattr(self.data, name)
            require(value == getattr(DataConfig(), name), f"data.{name}", value, use)


@dataclass(frozen=True)
class EvalSettings(EvalTask):
    """Settings of the evaluation during training."""

    every: Natural = 0
    """Optimizer steps between evaluations; 0: evaluate only before the first step (recorded as step
    0) and after the last.
    """
    tasks: Mapping[str, EvalTask] = field(default_factory=dict)
    """Additional tasks by name, each with `data`, `reward`, `samples` and so on; recorded as
    accuracy/NAME. The best checkpoint is selected by the main task above."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.tasks)


@dataclass(frozen=True)
class EvalConfig:
    """Configuration of `gac eval`: a model and its tasks."""

    model: ModelConfig = ModelConfig()
    """The model under evaluation and how to load it."""
    eval: EvalSettings = EvalSettings()
    """A single task, instead of `tasks`; its accuracies are printed as one JSON object."""
    tasks: Mapping[str, EvalTask] = field(default_factory=dict)
    """Several tasks by name, each with `data`, `reward`, `samples`, `temperature` and so on."""
    reward: Any = "math"
    """Default reward for tasks that do not set one; same format as in training."""
    out: str | None = None
    """Output folder for the results and answers; finished tasks are not rerun. null: `evals` for
    `tasks`; a single task is only printed, and an interrupted one continues when it is rerun."""
    seed: int = 0
    """Sampling seed."""

    def __post_init__(self) -> None:
        expand_paths(self, "out")
        if self.eval.every or self.eval.tasks:
            raise ValueError(
                "eval.every and eval.tasks apply only to training: remove them; `tasks` "
                "defines the tasks of an evaluation"
            )
        if self.tasks and self.eval != EvalSettings():
            raise ValueError("tasks and eval are both set: set only one of them")
        check_names(self.tasks)
        for name, task in self.tasks.items():
            if not task.data.prompts:
                raise ValueError(
                    f"tasks.{name}.data.prompts is missing: set it to a file or dataset"
                )
