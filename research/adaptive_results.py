"""Recomputes every number of research/adaptive.md: `python -m research.adaptive_results`.

Reads research/results/adaptive/runs.jsonl and writes the tables between the markers of the page.
With --check, only compares them. Differences are paired by seed; intervals are Student's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mpmath
import numpy as np

from gac.evaluation.table import markdown_table
from research.adaptive_run import (
    CONSTANTS,
    ORACLES,
    RESULTS,
    SCHEDULES,
    SEEDS,
    finished,
    key,
)
from research.adaptive_task import CELLS
from research.page_sections import update_pages

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "research" / "adaptive.md", ROOT / "docs" / "choose_mu.md")
NEEDED = 0.02
"""Headroom below which no controller can pay in a cell."""
POWER = 0.8
JUDGED = ("constant-alarm", "gac", "gac-paper")
"""The adaptive arms whose comparisons are judged."""
BEST = "best constant"
"""The constant that is best on the other seeds."""

Table = dict[str, dict[str, dict[int, float]]]
"""Cell -> arm -> seed -> accuracy."""


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The accuracies of the finished runs."""
    found: Table = {cell: {} for cell in CELLS}
    for row in rows:
        run = key(row)
        found[run.cell].setdefault(run.arm, {})[run.seed] = row["accuracy"]
    return found


def complete(arms: Mapping[str, Mapping[int, float]], name: str) -> bool:
    """Whether an arm has run with all seeds of the study."""
    return set(SEEDS) <= set(arms.get(name, ()))


def values(arms: Mapping[str, Mapping[int, float]], name: str) -> np.ndarray:
    """Accuracies of an arm, [seeds]; of `BEST`, the constant chosen without the seed's own run."""
    if name == BEST:
        return chosen_elsewhere(arms, constants(arms))
    return np.array([arms[name][seed] for seed in SEEDS])


def constants(arms: Mapping[str, Mapping[int, float]]) -> tuple[str, ...]:
    """The complete constants of a cell."""
    return tuple(name for name in CONSTANTS if complete(arms, name))


def chosen_elsewhere(
    arms: Mapping[str, Mapping[int, float]], candidates: Sequence[str]
) -> np.ndarray:
    """[seeds] accuracy of the candidate that has the highest mean on the *other* seeds."""
    matrix = np.array([values(arms, name) for name in candidates])
    others = matrix.sum(1, keepdims=True) - matrix
    return matrix[others.argmax(0), np.arange(matrix.shape[1])]


class Estimate(NamedTuple):
    """A mean over seeds with its interval."""

    mean: float
    low: float
    high: float
    p: float
    """Of a two-sided t test that the mean is 0."""
    sd: float


def t_quantile(p: float, freedom: int) -> float:
    """The quantile of Student's distribution."""
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    # P(|T| > t) = I_{v / (v + t^2)}(v / 2, 1 / 2)
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tails(middle, freedom) > 2 * (1 - p) else (low, middle)
    return low


def _tails(t: float, freedom: int) -> float:
    """P(|T| > |t|)."""
    x = freedom / (freedom + t**2)
    return float(mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True))


def estimate(differences: np.ndarray) -> Estimate:
    """The mean of paired differences, with Student's 95% interval."""
    n, mean, sd = len(differences), float(differences.mean()), float(differences.std(ddof=1))
    if sd == 0:
        return Estimate(mean, mean, mean, float(mean == 0), 0.0)
    error = sd / math.sqrt(n)
    half = t_quantile(0.975, n - 1) * error
    return Estimate(mean, mean - half, mean + half, _tails(mean / error, n - 1), sd)


def detectable(sd: float, n: int, level: float = 0.05) -> float:
    """The difference that a test at `level` finds with a probability of `POWER`."""
    return (t_quantile(1 - level / 2, n - 1) + t_quantile(POWER, n - 1)) * sd / math.sqrt(n)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values."""
    order, adjusted, largest = np.argsort(ps), [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


class Comparison(NamedTuple):
    """An adaptive arm against what it has to beat, in one cell or in all."""

    cell: str
    arm: str
    against: str
    result: Estimate
    adjusted: float


def headroom(found: Table, cell: str) -> Estimate:
    """The best schedule minus the best constant, each chosen on the other seeds."""
    best = chosen_elsewhere(found[cell], schedules(found, cell))
    return estimate(best - chosen_elsewhere(found[cell], constants(found[cell])))


def schedules(found: Table, cell: str) -> tuple[str, ...]:
    """The constants and the complete oracles of a cell."""
    own = (name for name in ORACLES[cell] if complete(found[cell], name))
    return (*constants(found[cell]), *own)


def tested(found: Table) -> list[str]:
    """The cells whose constants and an oracle are complete."""
    ready = [c for c in CELLS if len(constants(found[c])) == len(CONSTANTS)]
    return [cell for cell in ready if len(schedules(found, cell)) > len(CONSTANTS)]


def comparisons(found: Table) -> list[Comparison]:
    """Every judged comparison, with Holm's correction over all of them."""
    raw: list[tuple[str, str, str, Estimate]] = []
    cells = [c for c in CELLS if len(constants(found[c])) > 1]
    for arm in JUDGED:
        for against in (BEST, f"yoked-{arm}"):
            differences = {
                cell: values(found[cell], arm) - values(found[cell], against)
                for cell in cells
                if complete(found[cell], arm)
                and (against == BEST or complete(found[cell], against))
            }
            raw += [(c, arm, against, estimate(d)) for c, d in differences.items()]
            if len(differences) > 1:
                mean = np.mean(list(differences.values()), axis=0)
                raw.append(("all cells", arm, against, estimate(mean)))
    adjusted = holm([result.p for *_, result in raw])
    return [Comparison(*row, p) for row, p in zip(raw, adjusted, strict=True)]


def points(value: float) -> str:
    """An accuracy or a difference in percent."""
    return f"{100 * value:+.1f}"


def _interval(result: Estimate) -> str:
    return f"{points(result.mean)} [{points(result.low)}, {points(result.high)}]"


def judged_table(found: Table) -> str:
    """The judged comparisons."""
    rows = comparisons(found)
    lines = [
        [
            row.cell,
            f"`{row.arm}`",
            row.against if row.against == BEST else "its yoked control",
            _interval(row.result),
            f"{row.result.p:.3f}",
            f"{row.adjusted:.3f}",
            f"{100 * detectable(row.result.sd, len(SEEDS)):.1f}",
            f"{100 * detectable(row.result.sd, len(SEEDS), 0.05 / len(rows)):.1f}",
        ]
        for row in rows
    ]
    heads = ["cell", "arm", "minus", "points", "p", "p (Holm)", "visible", "visible (Holm)"]
    return markdown_table(heads, lines)


def headroom_table(found: Table) -> str:
    """The headroom of each tested cell, with the accuracy of its constants and oracles."""
    lines = []
    for cell in tested(found):
        names = schedules(found, cell)
        shown = [f"{name}: {100 * values(found[cell], name).mean():.1f}" for name in names]
        room = headroom(found, cell)
        enough = "yes" if room.mean >= NEEDED else "no"
        lines.append([cell, "; ".join(shown), _interval(room), enough])
    heads = ["cell", "accuracy of the constants and the oracles", "headroom", "enough"]
    return markdown_table(heads, lines)


def accuracy_table(found: Table) -> str:
    """The mean accuracy of every complete arm in each cell."""
    cells = [c for c in CELLS if any(complete(found[c], arm) for arm in found[c])]
    arms = list(dict.fromkeys(a for c in cells for a in found[c] if complete(found[c], a)))
    lines = []
    for arm in sorted(arms, key=lambda a: (a in SCHEDULES, a)):
        shown = []
        for cell in cells:
            if not complete(found[cell], arm):
                shown.append("")
                continue
            result = estimate(values(found[cell], arm))
            shown.append(
                f"{100 * result.mean:.1f} [{100 * result.low:.1f}, {100 * result.high:.1f}]"
            )
        lines.append([f"`{arm}`", *shown])
    return markdown_table(["arm", *cells], lines)


def sentence(found: Table) -> str:
    """What a user should know."""
    cell = "bad-demonstrations"
    own = next((c for c in comparisons(found) if c[:3] == (cell, "gac", BEST)), None)
    if own is None:
        return "An adaptive mu has not been compared on a pretrained model yet.\n"
    seen = 100 * detectable(own.result.sd, len(SEEDS))
    return (
        "On a pretrained model of 135 million parameters, an adaptive mu neither helped nor\n"
        "harmed: while the demonstrations turned bad, `gac` minus the best constant mu was "
        f"{_interval(own.result)}\n"
        f"points (one task, eight seeds; a difference of {seen:.1f} would have been seen).\n"
        "Knowing the moment of the change did not help either, so this says little about tasks\n"
        "on which it would ([study](../research/adaptive.md)).\n"
    )


SHOWN_STEPS = (1, 3, 6, 9, 12)


def path_table(rows: Sequence[Mapping[str, Any]], found: Table) -> str:
    """mu of the adaptive arms at some steps: the mean, and the range over the seeds."""
    lines = []
    for cell in CELLS:
        for arm in (a for a in JUDGED if complete(found[cell], a)):
            runs = [row for row in rows if (row["cell"], row["arm"]) == (cell, arm)]
            shown = []
            for step in SHOWN_STEPS:
                mu = [row["mu"][step - 1] for row in runs]
                shown.append(f"{np.mean(mu):.2f} ({min(mu):.2f} to {max(mu):.2f})")
            lowered = sum(any(row["demos_suspect"]) for row in runs)
            alarm = f"{lowered} of {len(runs)}" if runs[0]["demos_suspect"][0] is not None else ""
            lines.append([cell, f"`{arm}`", *shown, alarm])
    heads = ["cell", "arm", *(f"step {step}" for step in SHOWN_STEPS), "runs with an alarm"]
    return markdown_table(heads, lines)


def progress(found: Table, rows: Sequence[Mapping[str, Any]]) -> str:
    """What has been run, at which cost."""
    if not rows:
        return "No run is finished.\n"
    cost = [row["cpu_seconds"] for row in rows]
    commits = sorted({row["commit"] for row in rows})
    parts = [
        f"{cell}: {sum(map(len, found[cell].values()))} runs, "
        f"{sum(complete(found[cell], a) for a in found[cell])} complete arms"
        for cell in CELLS
        if found[cell]
    ]
    mean = sum(cost) / len(cost)
    return (
        f"{len(rows)} runs ({'; '.join(parts)}), {mean:.0f} CPU seconds each; "
        f"code: {', '.join(commits)}.\n"
    )


def sections(results: Path = RESULTS) -> dict[str, str]:
    """Marker -> text of every generated part of the page."""
    rows = [row for row in finished(results) if row["seed"] in SEEDS]
    found = table(rows)
    return {
        "progress": progress(found, rows),
        "judged": judged_table(found),
        "headroom": headroom_table(found),
        "accuracy": accuracy_table(found),
        "paths": path_table(rows, found),
        "sentence": sentence(found),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Update or check the pages; returns the exit code."""
    return update_pages("research.adaptive_results", __doc__, PAGES, sections(), argv)


if __name__ == "__main__":
    sys.exit(main())
