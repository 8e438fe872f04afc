"""Text samples for the report: prompts, responses and rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .groups import Group
from .reading import Run

SHOWN = 3  # entries of samples.jsonl: the first, the middle and the last


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The entries of samples.jsonl that the report shows, oldest first."""
    path = folder / "samples.jsonl"
    entries: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
            entries[entry["step"]] = entry
        except (json.JSONDecodeError, KeyError, TypeError):  # the last line of a killed run
            continue
    rows = [entries[step] for step in sorted(entries)]
    chosen = sorted({0, len(rows) // 2, len(rows) - 1}) if rows else []
    return [rows[i] for i in chosen]


def samples(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Each group's label and the samples of its first run; groups without samples are omitted."""
    return [
        {"label": group.label, "entries": entries}
        for group in groups
        if (entries := read_samples(group.runs[0].path))
    ]


def time_shares(run: Run) -> str:
    """How a run's time is divided, e.g. `sampling 60%, rewards 5%, training 35%`."""
    total = _sum(run, "seconds")
    if not total:
        return ""
    sampling, rewards = _sum(run, "sampling_seconds"), _sum(run, "reward_seconds")
    parts = {"sampling": sampling, "rewards": rewards, "training": total - sampling - rewards}
    shares = ", ".join(f"{name} {100 * value / total:.0f}%" for name, value in parts.items())
    return f"{total / len(run.metrics['seconds']):.3g} s per step: {shares}"


def _sum(run: Run, name: str) -> float:
    return float(np.nansum(run.metrics.get(name, np.zeros(1))))
