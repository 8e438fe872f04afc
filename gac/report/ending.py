"""The last lines of `gac train`: what the run achieved, where it is, and the next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gac.evaluation.table import percent, percent_interval
from gac.rollouts.config import STORED_PAIRS

from .reading import read_lines, read_run, time_shares

GAP = 0.1  # excess of the training reward over the held-out interval that counts as overfitting


def ending(folder: Path) -> str:
    """Accuracy before, best and after with intervals; time; model; overfitting; next command."""
    evaluations = read_lines(folder / "eval.jsonl")
    rows = [row for row in evaluations if row and row.get("accuracy") is not None]
    run = read_run(folder)
    lines = []
    if rows:
        best = max(rows, key=lambda row: row["accuracy"])
        lines.append(
            f"accuracy: {_accuracy(rows[0])} before, {_accuracy(best)} best (step {best['step']}), "
            f"{_accuracy(rows[-1])} after ({rows[-1]['prompts']} prompts)"
        )
    else:
        lines.append("accuracy: not measured; set eval.data.prompts")
    minutes = float(sum(run.metrics.get("seconds", ()))) / 60
    time = f"time: {minutes:.1f} min in {run.steps_done} steps", time_shares(run)
    lines.append("; ".join(filter(None, time)))
    lines.append(f"model: {folder / 'model'}" if (folder / "model").is_dir() else f"run: {folder}")
    if rows:
        own = run.config.get("eval", {}).get("reward") in (None, run.config.get("reward"))
        own &= run.config.get("rollouts", {}).get("function") != STORED_PAIRS  # not the policy's
        rewards = run.metrics.get("reward_mean", ()) if own else ()
        lines += filter(None, [_overfitting(rows[-1], rewards)])
    lines.append(f"next: gac report {shlex.quote(str(folder))}")
    return "\n".join(lines)


def _accuracy(row: Mapping[str, Any]) -> str:
    ends = row.get("ci95")
    interval = f" {percent_interval(ends)}" if ends else ""
    return f"{percent(row['accuracy'])}%{interval}"


def _overfitting(row: Mapping[str, Any], rewards: Any) -> str | None:
    """Compare the reward in the last fifth of the steps with the held-out accuracy.

    None: there is nothing to compare.
    """
    recent = [
        float(value) for value in rewards[-max(1, len(rewards) // 5) :] if math.isfinite(value)
    ]
    if not recent or not row.get("ci95"):
        return None
    reward = sum(recent) / len(recent)
    at_end = f"reward {percent(reward)}% on the training prompts at the end"
    if reward == 0 and row["accuracy"] == 0:
        return (
            f"{at_end}: nothing was rewarded; read the answers in samples.jsonl, and run `gac "
            "rewards check` on the configuration"
        )
    return f"overfitting: {'yes' if reward > row['ci95'][1] + GAP else 'no sign of it'}; {at_end}"
