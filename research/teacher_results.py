"""Recomputes every number of research/teacher.md: `python -m research.teacher_results`.

Reads research/results/teacher/runs.jsonl and writes the tables between the markers of the page.
With --check, only compares them. Differences are paired by seed; intervals are Student's, 95%.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gac.evaluation.table import markdown_table
from research.adaptive_results import estimate
from research.adaptive_run import finished
from research.page_sections import update_pages
from research.teacher_run import ARMS, LEAST, LRS, RESULTS, SEEDS, STEPS, key

PAGE = Path(__file__).resolve().parent / "teacher.md"
OTHER = ("products", "successors")
"""The tasks that no run trains on."""

Row = Mapping[str, Any]
Arm = tuple[str, float]
"""Its name and the learning rate."""
Columns = Sequence[tuple[str, int]]
"""Names of evaluated values, and the digits shown."""


def complete(rows: Sequence[Row], experiment: str) -> dict[Arm, list[Row]]:
    """The rows of each arm of an experiment: the seeds from 0 on that are complete, if enough.

    The arms of `sdft` with one learning rate have the same seeds.
    """
    found: dict[Arm, list[Row]] = {}
    for arm in ARMS[experiment]:
        for lr in LRS:
            own = {r["seed"]: r for r in rows if key(r)[:3] == (experiment, arm, lr)}
            seeds = list(itertools.takewhile(own.__contains__, SEEDS))
            if len(seeds) >= LEAST:
                found[arm, lr] = [own[seed] for seed in seeds]
    if experiment == "sdft":
        for lr in LRS:
            pair = [(arm, lr) for arm in ARMS[experiment] if (arm, lr) in found]
            count = min((len(found[arm]) for arm in pair), default=0)
            found |= {arm: found[arm][:count] for arm in pair}
    return found


def at(rows: Sequence[Row], column: str, step: int) -> np.ndarray:
    """A column of the evaluation after `step`, of each seed; accuracies in percent."""
    scale = 100 if column.startswith("accuracy") else 1
    found = [next(c[column] for c in row["curve"] if c["step"] == step) for row in rows]
    return scale * np.array(found)


def interval(values: np.ndarray, digits: int, sign: str = "") -> str:
    """The mean of the seeds with its interval."""
    found = estimate(values)
    bounds = ", ".join(f"{x:{sign}.{digits}f}" for x in (found.low, found.high))
    return f"{found.mean:{sign}.{digits}f} [{bounds}]"


def before(arms: Mapping[Arm, list[Row]], columns: Columns) -> list[tuple[str, ...]]:
    """The line of the model before training, the same for all arms; none without an arm."""
    return [
        ("before", *(f"{at(own[:1], column, 0)[0]:.{digits}f}" for column, digits in columns))
        for own in list(arms.values())[:1]
    ]


def evaluated_steps(arms: Mapping[Arm, list[Row]]) -> list[int]:
    """The steps of the evaluations, which are the same for all arms."""
    return [c["step"] for own in list(arms.values())[:1] for c in own[0]["curve"]]


COLUMNS: Columns = (("accuracy/sums", 1), ("reverse_kl/sums", 3), ("forward_kl/sums", 3))


def opd_table(rows: Sequence[Row]) -> str:
    """The student before and after each arm, and what the arm changed."""
    arms = complete(rows, "opd")
    head = ("student", "accuracy on sums, %", "KL(student, teacher)", "KL(teacher, student)")
    lines = before(arms, COLUMNS)
    for (arm, _), own in arms.items():
        last = [interval(at(own, column, STEPS), digits) for column, digits in COLUMNS]
        lines.append((f"`{arm}`, {len(own)} seeds", *last))
    for (arm, _), own in arms.items():
        changes = [
            interval(at(own, column, STEPS) - at(own, column, 0), digits, "+")
            for column, digits in COLUMNS
        ]
        lines.append((f"`{arm}` minus before", *changes))
    return markdown_table(head, lines) + "\n"


def opd_curve(rows: Sequence[Row]) -> str:
    """Mean accuracy and divergence of each arm during the run."""
    arms = complete(rows, "opd")
    steps = evaluated_steps(arms)
    lines = [
        (
            f"`{arm}`",
            *(
                f"{at(own, 'accuracy/sums', t).mean():.1f}, "
                f"{at(own, 'reverse_kl/sums', t).mean():.3f}"
                for t in steps
            ),
        )
        for (arm, _), own in arms.items()
    ]
    return markdown_table(("accuracy, KL", *(f"step {t}" for t in steps)), lines) + "\n"


def sdft_table(rows: Sequence[Row]) -> str:
    """Each arm after the last step: what it learned and what it forgot."""
    arms = complete(rows, "sdft")
    columns = [("accuracy/sums", 1), *((f"accuracy/{task}", 1) for task in OTHER)]
    columns += [(f"reverse_kl/{task}", 3) for task in OTHER]
    head = ("run", "accuracy on sums, %", *(f"accuracy on {task}, %" for task in OTHER))
    head += tuple(f"KL to the start on {task}" for task in OTHER)
    lines = before(arms, columns)
    for (arm, lr), own in arms.items():
        last = [interval(at(own, column, STEPS), digits) for column, digits in columns]
        lines.append((f"`{arm}`, learning rate {lr:g}, {len(own)} seeds", *last))
    for lr in LRS:
        pair = arms.get(("sdft", lr)), arms.get(("sft", lr))
        if pair[0] and pair[1]:
            gaps = [
                interval(at(pair[0], c, STEPS) - at(pair[1], c, STEPS), digits, "+")
                for c, digits in columns
            ]
            lines.append((f"`sdft` minus `sft`, learning rate {lr:g}", *gaps))
    return markdown_table(head, lines) + "\n"


def sdft_curve(rows: Sequence[Row]) -> str:
    """What was learned and forgotten during the run: means over the seeds."""
    arms = complete(rows, "sdft")
    steps = evaluated_steps(arms)
    lines = []
    for (arm, lr), own in arms.items():
        cells = []
        for t in steps:
            learned = at(own, "accuracy/sums", t).mean()
            kl = np.mean([at(own, f"reverse_kl/{task}", t).mean() for task in OTHER])
            cells.append(f"{learned:.1f}, {kl:.3f}")
        lines.append((f"`{arm}`, {lr:g}", *cells))
    head = ("accuracy on sums, KL on other tasks", *(f"step {t}" for t in steps))
    return markdown_table(head, lines) + "\n"


def progress(rows: Sequence[Row]) -> str:
    """Number, cost and code of the runs."""
    if not rows:
        return "No run is complete.\n"
    seconds = sum(row["cpu_seconds"] for row in rows)
    arms = sum(len(complete(rows, experiment)) for experiment in ARMS)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return (
        f"{len(rows)} runs, {arms} reported arms, {seconds / 60:.0f} CPU minutes; "
        f"code: {commits}.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the sections of the page, or check them."""
    rows = finished(RESULTS)
    sections = {
        "progress": progress(rows),
        "opd": opd_table(rows),
        "opd-curve": opd_curve(rows),
        "sdft": sdft_table(rows),
        "sdft-curve": sdft_curve(rows),
    }
    return update_pages("research.teacher_results", __doc__, [PAGE], sections, argv)


if __name__ == "__main__":
    sys.exit(main())
