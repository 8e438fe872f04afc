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
    ADAPTIVE,
    RESULTS,
    SCHEDULES,
    SEEDS,
    constants,
    finished,
    key,
    oracles,
)
from research.adaptive_task import CELLS, CODE, SUMS, Task
from research.page_sections import update_pages

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "research" / "adaptive.md", ROOT / "docs" / "choose_mu.md")
NEEDED = 0.02
"""Headroom below which no controller can pay in a cell."""
POWER = 0.8
BEST = "best constant"
"""The constant that is best on the other seeds."""
ALL = "all cells"
"""The mean over the cells of a task."""

Arms = Mapping[str, Mapping[int, float]]
"""Arm -> seed -> accuracy, in one cell."""
Table = dict[str, dict[str, dict[int, float]]]
"""Cell -> arm -> seed -> accuracy."""


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The accuracies of the finished runs."""
    found: Table = {cell: {} for cell in CELLS}
    for row in rows:
        run = key(row)
        found[run.cell].setdefault(run.arm, {})[run.seed] = row["accuracy"]
    return found


def complete(arms: Arms, names: Sequence[str]) -> list[str]:
    """The arms that have run with all seeds of the study."""
    return [name for name in names if set(SEEDS) <= set(arms.get(name, ()))]


def values(arms: Arms, name: str) -> np.ndarray:
    """[seeds] accuracies of an arm."""
    return np.array([arms[name][seed] for seed in SEEDS])


def chosen_elsewhere(arms: Arms, candidates: Sequence[str]) -> np.ndarray:
    """[seeds] accuracy of the candidate with the highest mean on the *other* seeds.

    Of several, it is the first; sums are rounded, so that they tie if the numbers of answers do.
    """
    matrix = np.array([values(arms, name) for name in candidates])
    others = np.round(matrix.sum(1, keepdims=True) - matrix, 9)
    return matrix[others.argmax(0), np.arange(matrix.shape[1])]


def best_constant(found: Table, cell: str) -> np.ndarray:
    """[seeds] accuracy of the constant that is best on the other seeds."""
    return chosen_elsewhere(found[cell], complete(found[cell], constants(cell)))


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
    """An adaptive arm against what it has to beat, in one cell or in all cells of its task."""

    cell: str
    arm: str
    against: str
    result: Estimate
    adjusted: float
    """p after Holm's correction over all comparisons of the task."""
    visible: float
    """The difference that a study with this spread finds with a probability of `POWER`."""


def cells(task: Task, found: Table) -> list[str]:
    """The cells of a task with a complete constant."""
    own = (cell for cell in CELLS if CELLS[cell].task is task)
    return [cell for cell in own if complete(found[cell], constants(cell))]


def schedules(found: Table, cell: str) -> list[str]:
    """The complete constants and oracles of a cell."""
    return complete(found[cell], [*constants(cell), *oracles(cell)])


def headroom(found: Table, cell: str) -> Estimate:
    """The best schedule minus the best constant, each chosen on the other seeds."""
    best = chosen_elsewhere(found[cell], schedules(found, cell))
    return estimate(best - best_constant(found, cell))


def differences(task: Task, found: Table, arm: str) -> dict[tuple[str, str], np.ndarray]:
    """(cell, against) -> [seeds] differences of an adaptive arm, as far as they are complete."""
    own: dict[tuple[str, str], np.ndarray] = {}
    yoked = f"yoked-{arm}"
    for cell in cells(task, found):
        arms = found[cell]
        if complete(arms, [arm]):
            own[cell, BEST] = values(arms, arm) - best_constant(found, cell)
        if len(complete(arms, [arm, yoked])) == 2:
            own[cell, yoked] = values(arms, arm) - values(arms, yoked)
    for against in (BEST, yoked):
        parts = [value for (_, other), value in own.items() if other == against]
        if len(parts) > 1:
            own[ALL, against] = np.mean(parts, axis=0)
    return own


def comparisons(task: Task, found: Table) -> list[Comparison]:
    """Every judged comparison of a task, with Holm's correction over all of them."""
    raw = [
        (cell, arm, against, estimate(difference))
        for arm in ADAPTIVE[task]
        for (cell, against), difference in differences(task, found, arm).items()
    ]
    adjusted = holm([result.p for *_, result in raw])
    return [
        Comparison(*row, p, detectable(row[-1].sd, len(SEEDS)))
        for row, p in zip(raw, adjusted, strict=True)
    ]


def points(value: float) -> str:
    """An accuracy or a difference in percent."""
    return f"{100 * value:+.1f}"


def _interval(result: Estimate) -> str:
    return f"{points(result.mean)} [{points(result.low)}, {points(result.high)}]"


def headroom_table(found: Table) -> str:
    """The headroom of each cell with a complete oracle."""
    lines = []
    for cell in (c for task in (SUMS, CODE) for c in cells(task, found)):
        names = schedules(found, cell)
        if not set(names) & set(oracles(cell)):
            continue
        shown = [f"{name}: {100 * values(found[cell], name).mean():.1f}" for name in names]
        room = headroom(found, cell)
        enough = "yes" if room.mean >= NEEDED else "no"
        lines.append([cell, "; ".join(shown), _interval(room), enough])
    heads = ["cell", "accuracy of the constants and the oracles", "headroom", "enough"]
    return markdown_table(heads, lines)


def arms_table(task: Task, found: Table) -> str:
    """The judged comparisons of a task, and below them the accuracies of the other arms.

    Those of the constants and the oracles are in `headroom_table`.
    """
    judged = {(row.cell, row.arm, row.against): row for row in comparisons(task, found)}
    lines, others = [], ""
    for cell in (c for c in CELLS if CELLS[c].task is task):
        arms = found[cell]
        own = [arm for arm in ADAPTIVE[task] if (cell, arm, BEST) in judged]
        lines += [[cell, f"`{a}`", _accuracy(arms, a), *_judged(judged, cell, a)] for a in own]
        rest = [a for a in complete(arms, sorted(arms)) if a not in {*own, *SCHEDULES[task]}]
        if rest:
            shown = "; ".join(f"`{arm}` {_accuracy(arms, arm)}" for arm in rest)
            others += f"\n\n{cell}, other arms: {shown}."
    over = [arm for arm in ADAPTIVE[task] if (ALL, arm, BEST) in judged]
    lines += [[ALL, f"`{arm}`", "", *_judged(judged, ALL, arm)] for arm in over]
    versus = [x for name in (BEST, "yoked control") for x in (f"minus {name}", "p", "visible")]
    return markdown_table(["cell", "arm", "accuracy", *versus], lines) + others


def _accuracy(arms: Arms, arm: str) -> str:
    result = estimate(values(arms, arm))
    return f"{100 * result.mean:.1f} [{100 * result.low:.1f}, {100 * result.high:.1f}]"


def _judged(rows: Mapping[tuple[str, str, str], Comparison], cell: str, arm: str) -> list[str]:
    """The difference, the corrected p and the visible difference, against both."""
    shown = []
    for against in (BEST, f"yoked-{arm}"):
        row = rows.get((cell, arm, against))
        shown += ["", "", ""] if row is None else _three(row)
    return shown


def _three(row: Comparison) -> list[str]:
    return [_interval(row.result), f"{row.adjusted:.3f}", f"{100 * row.visible:.1f}"]


MOVED = 0.1
"""Smallest range of the mean mu over a run that `path_table` shows."""


def path_table(rows: Sequence[Mapping[str, Any]], found: Table) -> str:
    """mu around the change, of the adaptive arms that move it: the mean, and the range of seeds."""
    lines = []
    for cell, spec in CELLS.items():
        for arm in complete(found[cell], list(ADAPTIVE[spec.task])):
            runs = [row for row in rows if (row["cell"], row["arm"]) == (cell, arm)]
            if np.ptp(np.mean([row["mu"] for row in runs], axis=0)) < MOVED:
                continue
            shown = []
            for at in (first_step, last_before, third_after, last_step):
                mu = [row["mu"][at(row["second"])] for row in runs]
                shown.append(f"{np.mean(mu):.2f} ({min(mu):.2f} to {max(mu):.2f})")
            lowered = sum(any(row["demos_suspect"]) for row in runs)
            alarm = f"{lowered} of {len(runs)}" if runs[0]["demos_suspect"][0] is not None else ""
            lines.append([cell, f"`{arm}`", *shown, alarm])
    heads = ["step 1", "last before the change", "third after it", "last step", "alarms"]
    return markdown_table(["cell", "arm", *heads], lines)


def first_step(second: Sequence[int]) -> int:
    """Index of the first step."""
    return 0


def last_before(second: Sequence[int]) -> int:
    """Index of the last step before the second regime."""
    return second.index(1) - 1


def third_after(second: Sequence[int]) -> int:
    """Index of the third step of the second regime."""
    return second.index(1) + 2


def last_step(second: Sequence[int]) -> int:
    """Index of the last step."""
    return len(second) - 1


def paying(found: Table) -> list[str]:
    """The arms that beat the best constant and their yoked control in a cell with headroom."""
    arms = []
    for task in (CODE, SUMS):
        better = {
            (row.cell, row.arm, row.against)
            for row in comparisons(task, found)
            if row.result.mean > 0 and row.adjusted < 0.05
        }
        for cell in cells(task, found):
            if headroom(found, cell).mean >= NEEDED:
                both = (arm for arm in ADAPTIVE[task] if (cell, arm, f"yoked-{arm}") in better)
                arms += [arm for arm in both if (cell, arm, BEST) in better]
    return arms


def sentence(found: Table) -> str:
    """What a user should know."""
    cell = "code-bad-demonstrations"
    rows = {row[:3]: row for task in (CODE, SUMS) for row in comparisons(task, found)}
    if (cell, "gac-fast", BEST) not in rows:
        return "An adaptive mu has not been compared on a pretrained model yet.\n"
    paid = paying(found)
    fast, alarm = (rows[cell, arm, BEST] for arm in ("gac-fast", "constant-alarm"))
    bad, noisy = (rows[name, "gac", BEST] for name in ("bad-demonstrations", "noisy-rewards"))
    return (
        f"On a pretrained model of 135 million parameters, an adaptive mu "
        f"{'paid: ' + ', '.join(paid) if paid else 'did not pay'} (eight seeds). Where\n"
        "demonstrations of a new code turn bad, a schedule that knows the moment is "
        f"{_interval(headroom(found, cell))} points above the\n"
        f"best constant; `gac` without a prior is {_interval(fast.result)}, and `constant-alarm` "
        f"{_interval(alarm.result)}\n"
        f"(differences of {100 * fast.visible:.0f} and {100 * alarm.visible:.0f} would have been "
        "seen). In sums, such a schedule gains nothing, and `gac` is\n"
        f"{_interval(bad.result)} with bad demonstrations and {_interval(noisy.result)} with noisy "
        "rewards\n([study](../research/adaptive.md)).\n"
    )


def progress(found: Table, rows: Sequence[Mapping[str, Any]]) -> str:
    """What has been run, at which cost."""
    if not rows:
        return "No run is finished.\n"
    cost = [row["cpu_seconds"] for row in rows]
    commits = sorted({row["commit"] for row in rows})
    parts = [
        f"{cell}: {sum(map(len, found[cell].values()))} runs, "
        f"{len(complete(found[cell], list(found[cell])))} complete arms"
        for cell in CELLS
        if found[cell]
    ]
    mean = sum(cost) / len(cost)
    first = [row["reward_mean"][0] for row in rows if CELLS[row["cell"]].task is CODE]
    known = [share for share in first if share is not None] or [0.0]
    return (
        f"{len(rows)} runs ({'; '.join(parts)}), {mean:.0f} CPU seconds each; code:\n"
        f"{', '.join(commits)}. Before training, {100 * np.mean(known):.1f}% of the sampled "
        "answers in the code are right.\n"
    )


def sections(results: Path = RESULTS) -> dict[str, str]:
    """Marker -> text of every generated part of the page."""
    rows = [row for row in finished(results) if row["seed"] in SEEDS]
    found = table(rows)
    return {
        "progress": progress(found, rows),
        "headroom": headroom_table(found),
        "code": arms_table(CODE, found),
        "sums": arms_table(SUMS, found),
        "paths": path_table(rows, found),
        "sentence": sentence(found),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Update or check the pages; returns the exit code."""
    return update_pages("research.adaptive_results", __doc__, PAGES, sections(), argv)


if __name__ == "__main__":
    sys.exit(main())
