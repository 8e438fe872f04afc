"""Reads run directories as numeric columns, including those of killed or running trainers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gac.config import read_yaml

Columns = Mapping[str, np.ndarray]
"""Field -> float64 [rows]; nan where a row lacks it. Always has "step", strictly increasing."""


@dataclass(frozen=True)
class Run:
    """The contents of one run directory."""

    path: Path
    config: Mapping[str, Any]
    """config.yaml as plain types; empty if there is no such file."""
    metrics: Columns
    """One row per optimizer step; `tokens` and `seconds` are per step."""
    evals: Columns
    """One row per evaluation: accuracy, accuracy/<split>, prompts, and the ends of its 95%
    interval, `low` and `high`."""
    unreadable: int
    """Number of unreadable lines. A killed run leaves at most one, at the end of each file."""

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps in metrics.jsonl."""
        return len(self.metrics["step"])

    @property
    def steps_planned(self) -> int | None:
        ended = math.isfinite(self.metrics.get("ended", [math.nan])[-1])  # before `steps`
        steps = self.steps_done if ended else self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def tasks(self) -> list[str]:
        """Names of the additional tasks evaluated during training."""
        settings = self.config.get("eval")
        tasks = settings.get("tasks") if isinstance(settings, Mapping) else None
        return [name for name in tasks or () if f"accuracy/{name}" in self.evals]

    @property
    def splits(self) -> list[str]:
        """Names after `accuracy/` in the evaluations: splits, additional tasks and their splits."""
        return [name.partition("/")[2] for name in self.evals if name.startswith("accuracy/")]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Find run directories at or below the paths. Raises FileNotFoundError if a path has none."""
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if (path / "metrics.jsonl").is_file():
            folders[path] = None
            continue
        below = sorted(file.parent for file in path.rglob("metrics.jsonl"))
        if not below:
            raise FileNotFoundError(
                f"{path}: no runs found (no metrics.jsonl or results.json in or below it)"
            )
        folders |= dict.fromkeys(below)
    return list(folders)


def read_run(path: Path) -> Run:
    """Read config.yaml, metrics.jsonl and eval.jsonl; missing files count as empty."""
    metrics, torn_metrics = read_columns(path / "metrics.jsonl")
    evals, torn_evals = read_columns(path / "eval.jsonl")
    file = path / "config.yaml"
    config = read_yaml(file) if file.is_file() else {}
    return Run(path, config, metrics, evals, torn_metrics + torn_evals)


def read_columns(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """Read JSON lines as columns; also returns the number of unreadable lines.

    A row whose step is not greater than the previous one comes from a resumed run. It replaces the
    earlier rows from its step on.
    """
    rows: list[Mapping[str, Any]] = []
    unreadable = 0
    for row in read_lines(path):
        if row is None:
            unreadable += 1
            continue
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        ends = row["ci95"] if isinstance(row.get("ci95"), list) else ()
        rows.append({**row, **dict(zip(("low", "high"), ends, strict=False))})
    names = dict.fromkeys(["step", *(name for row in rows for name in row)])
    columns = {name: np.array([_number(row.get(name)) for row in rows]) for name in names}
    is_number = {name: name == "step" or np.isfinite(c).any() for name, c in columns.items()}
    return {name: column for name, column in columns.items() if is_number[name]}, unreadable


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf value) pairs of a nested configuration."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_lines(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield each non-empty line as a dict; None if the line is not an object with a finite step."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            valid = isinstance(row, dict) and math.isfinite(_number(row.get("step")))
            yield row if valid else None


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def time_shares(run: Run) -> str:
    """How a run's time is divided, e.g. `sampling 60%, rewards 5%, training 35%`."""
    names = ("seconds", "sampling_seconds", "reward_seconds")
    total, sampling, rewards = (float(np.nansum(run.metrics.get(name, 0.0))) for name in names)
    if not total:
        return ""
    parts = {"sampling": sampling, "rewards": rewards, "training": total - sampling - rewards}
    shares = ", ".join(f"{name} {100 * value / total:.0f}%" for name, value in parts.items())
    return f"{total / len(run.metrics['seconds']):.3g} s per step: {shares}"
