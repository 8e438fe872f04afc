"""Checks a dataset by scoring its reference solutions with its own reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gac.errors import ConfigError
from gac.models.config import ModelConfig
from gac.models.source import check_tokenizer, one_line_errors

from ..config import load, read_yaml
from ..data.config import DataConfig
from ..data.examples import load_references
from ..errors import finite, value_errors_as
from .base import as_outcome, notes_of
from .build import build_reward
from .completion import Markers, markers_of


@dataclass(frozen=True)
class CheckConfig:
    """The part of a configuration that defines the data, the reward and the tokenizer."""

    data: DataConfig
    """The prompts. A row's reference solution is its demonstration; with `demo_field: null`, its
    answer.
    """
    reward: Any = "math"
    """A name, a mapping or package.module:function."""
    model: ModelConfig = ModelConfig()
    """The model of the run. Only the reasoning markers of its tokenizer matter."""


@dataclass(frozen=True)
class FailedRow:
    """A row whose reference solution scores below the threshold."""

    task: str
    """Task name; "" if the configuration has a single task."""
    row: str
    """Row id, or file and line or row."""
    reason: str

    def __str__(self) -> str:
        return f"{self.task}{': ' if self.task else ''}{self.row}: {self.reason}"


@dataclass(frozen=True)
class CheckResult:
    """Result of `check`."""

    rows: int
    failing: tuple[FailedRow, ...]
    weak: tuple[FailedRow, ...]
    """Rows that a completion passes which solves nothing, such as a program that returns 0."""
    counts: Mapping[str, int]
    """Event counts of the rewards, e.g. timeouts."""


def check(
    config: Path | Mapping[str, Any], overrides: Sequence[str] = (), min_reward: float = 1.0
) -> CheckResult:
    """Score the reference solution of every row.

    Args:
        config: a `gac train` or `gac eval` configuration, as a file or a mapping. Only the reward
            and the data are read (`data`, `eval.data`, or the data of each task in `tasks`), and
            the tokenizer if it is in a local folder: solutions are graded as in a run, after its
            reasoning markers. Otherwise the reward knows `<think>` and its key `reasoning`.
        overrides: `key.sub=value`, e.g. `data.limit=20`.
        min_reward: the reward that a reference solution must reach.

    Raises:
        ConfigError: `config` has no data, a key or value is invalid, or the tokenizer cannot be
            loaded.
        DataError: a row is invalid; the message names the file, line or row, and field.
    """
    with value_errors_as(ConfigError):
        finite("--min-reward", min_reward)
    raw = config if isinstance(config, Mapping) else read_yaml(config)
    rows = 0
    failing: list[FailedRow] = []
    weak: list[FailedRow] = []
    counts: Counter[str] = Counter()
    for task, part in _parts(raw).items():
        task_config = load(CheckConfig, part, overrides)
        try:
            reward = build_reward(task_config.reward)
            pairs = load_references(task_config.data)
        except ValueError as error:
            raise ConfigError(f"{task}{': ' if task else ''}{error}") from error
        if getattr(reward, "reasoning", ()) is None:
            reward.reasoning = _markers(task_config.model)
        examples, solutions = [e for e, _ in pairs], [text for _, text in pairs]
        try:
            outcomes = [as_outcome(o) for o in reward.outcomes(solutions, examples)]
            for example, text, outcome in zip(examples, solutions, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    failing.append(FailedRow(task, example.id, f"{notes_of(outcome)}{outcome}"))
                elif outcome < min_reward:
                    why = reward.explain(text, example)
                    reason = f"scores {outcome:g}{'; ' if why else ''}{why}"
                    failing.append(FailedRow(task, example.id, reason))
                elif passing := reward.passed_by(example):
                    weak.append(FailedRow(task, example.id, f"weak: {passing[0]} passes"))
        finally:
            reward.close()
        rows += len(pairs)
        counts.update(reward.counts())
    return CheckResult(rows, tuple(failing), tuple(weak), counts)


def _markers(model: ModelConfig) -> Markers | None:
    """The reasoning markers of a tokenizer in a local folder; None if it is elsewhere."""
    if not Path(model.tokenizer or model.path or "-").is_dir():
        return None
    key, folder = check_tokenizer(model)
    from transformers import AutoTokenizer

    with one_line_errors(key, folder):
        return markers_of(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _parts(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Split a configuration into tasks: name ("" for a single task) -> fields of `CheckConfig`."""
    tasks = raw.get("tasks")
    if isinstance(tasks, Mapping):
        shared = {key: raw[key] for key in ("reward", "model") if raw.get(key)}
        return {str(n): {**shared, **_part(t, f"tasks.{n}")} for n, t in tasks.items()}
    return {"": _part(raw, "the configuration")}


_KEYS = tuple(field.name for field in fields(CheckConfig))


def _part(raw: Any, where: str) -> dict[str, Any]:
    raw = raw if isinstance(raw, Mapping) else {}
    task = {} if "data" in raw else raw.get("eval")
    settings = [s for s in (raw, task) if isinstance(s, Mapping)]  # the last one decides
    part = {k: v for s in settings for k, v in s.items() if k in _KEYS and v}
    if "data" not in part:
        raise ConfigError(f"{where} has no data: set data.prompts")
    return part
