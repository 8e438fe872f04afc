"""Recomputes the numbers of the study's pages: `python -m research.study_results`.

Reads research/results/study and writes the tables between the markers of the pages. With --check,
only compares them. Intervals are 95% percentile intervals of a hierarchical bootstrap: tasks, then
seeds within each task. Five tasks are too few for a bootstrap over tasks, so the tables `tasks` and
`survives` have t intervals over the tasks' means beside them.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gac.evaluation.table import markdown_table
from gac.study.results import interval as t_interval
from research.page_sections import update_pages
from research.study_run import (
    BASES,
    CONDITIONS,
    CONFIRMATION_SEEDS,
    CONFIRMED,
    MAIN,
    PHASES,
    RESULTS,
    SEEDS,
    TASKS,
    TURNS,
    finished,
    tuning_means,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "research" / "study.md", ROOT / "docs" / "choose_mu.md")
RESAMPLES = 10_000
COMPARED = ("constant-alarm", "sft-then-rl")
JUDGED = (
    ("constant-alarm", "mu-0.4"),
    ("constant-alarm", "sft-then-rl"),
    ("routing", "constant-alarm"),
    ("named-sources", "constant-alarm"),
)
"""Differences that the protocol asks for, and that of `named-sources` where sources have names."""
JUDGED_AGAIN = (
    ("gac-paper", "constant-alarm"),
    ("constant-alarm-phi", "constant-alarm"),
    ("gac-paper", "constant-alarm-phi"),
    ("gac-paper", "gac-paper-one"),
    ("gac-paper-one", "constant-alarm"),
    ("sft-then-rl-phi", "sft-then-rl"),
    ("constant-alarm-phi", "sft-then-rl-phi"),
)
"""Differences of the confirmation."""
PHI = (
    ("gac-paper", "gac-paper-one"),
    ("sft-then-rl-phi", "sft-then-rl"),
    ("constant-alarm-phi", "constant-alarm"),
)
"""What the token weight phi changes; runs of the confirmation."""
AFTERWARDS = (("sft-then-rl-phi", "constant-alarm"),)
"""Differences of the confirmation that its protocol did not ask for."""
WITHOUT = [condition for condition in CONDITIONS if condition != "good-then-bad"]
Part = tuple[list[str], Sequence[str]]
OVERALL: list[Part] = [(list(BASES), CONDITIONS), *(([base], CONDITIONS) for base in BASES)]
BY_CONDITION: list[Part] = [(list(BASES), [condition]) for condition in CONDITIONS]
"""Bases and conditions over which a column averages."""
EARLIER = {"first": "gate-z", "second": "gate-cosine", "third": "gate-alarm"}
"""File in research/results/study -> the arm that was judged."""
CHANGING = ("spoil", "half", "burst", "flicker", "mistaken")
"""Scenarios of the fourth study in which good demonstrations turn bad in the middle of a run."""

Row = dict[str, Any]
Key = tuple[str, str, str, int]  # task, base, condition, seed


class Study:
    """The finished runs of a grid; its first seeds, if an arm of `main` has not finished all."""

    def __init__(
        self, rows: Iterable[Row], seeds: Sequence[int] = SEEDS, main: Iterable[str] = MAIN
    ) -> None:
        self.runs: dict[str, dict[Key, Row]] = defaultdict(dict)
        for row in rows:
            key = (row["task"], row["base"], row["condition"], row["seed"])
            self.runs[row["arm"]][key] = row
        self.seeds = seeds
        while self.seeds and not all(self.complete(arm, "mid") for arm in main):
            self.seeds = self.seeds[:-1]

    def complete(self, arm: str, base: str, conditions: Sequence[str] = CONDITIONS) -> bool:
        """Whether all of the arm's runs with this base and `seeds` are finished."""
        keys = ((t, base, c, s) for t in TASKS for c in conditions for s in self.seeds)
        return all(key in self.runs.get(arm, {}) for key in keys)

    def bases(self, *arms: str) -> list[str]:
        """The bases for which every one of `arms` is complete."""
        return [base for base in BASES if all(self.complete(arm, base) for arm in arms)]

    def table(
        self, value: Callable[[Key], float], bases: Sequence[str], conditions: Sequence[str]
    ) -> np.ndarray:
        """[tasks, seeds] means of `value` over bases and conditions."""
        return np.array(
            [
                [
                    np.mean([value((t, b, c, s)) for b in bases for c in conditions])
                    for s in self.seeds
                ]
                for t in TASKS
            ]
        )

    def final(self, arm: str) -> Callable[[Key], float]:
        """The accuracy after the last step, in percent."""
        return lambda key: 100 * self.runs[arm][key]["accuracy"][-1]

    def difference(
        self, arm: str, other: str, bases: Sequence[str], conditions: Sequence[str] = CONDITIONS
    ) -> str:
        """Mean difference of the accuracies in points, with its interval."""
        own, others = self.final(arm), self.final(other)
        values = self.table(lambda key: own(key) - others(key), bases, conditions)
        low, high = interval(values)
        return f"{values.mean():+.1f} [{low:+.1f}, {high:+.1f}]"

    def over_tasks(
        self, arm: str, other: str, bases: Sequence[str], conditions: Sequence[str] = CONDITIONS
    ) -> str:
        """The same difference with a t interval over the tasks; bold if it excludes 0."""
        own, others = self.final(arm), self.final(other)
        by_task = self.table(lambda key: own(key) - others(key), bases, conditions).mean(1)
        low, high = t_interval(by_task.tolist()) or (math.nan, math.nan)
        text = f"{by_task.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
        return f"**{text}**" if low > 0 or high < 0 else text

    def at_equal_time(self, arm: str, bases: Sequence[str]) -> float:
        """Accuracy at the last evaluation within the CPU time that `sft` takes for its run."""

        def value(key: Key) -> float:
            row, limit = self.runs[arm][key], self.runs["sft"][key]["seconds"]
            times = [row["seconds"] * step / row["evaluated"][-1] for step in row["evaluated"]]
            within = [a for a, t in zip(row["accuracy"], times, strict=True) if t <= limit]
            return 100 * within[-1]

        return float(self.table(value, bases, CONDITIONS).mean())


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% interval of the mean of `values` [tasks, seeds]: resample tasks, then seeds in each."""
    rng = np.random.default_rng(seed)
    tasks, seeds = values.shape
    drawn = rng.integers(tasks, size=(RESAMPLES, tasks, 1))
    means = values[drawn, rng.integers(seeds, size=(RESAMPLES, tasks, seeds))].mean((1, 2))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def names() -> list[str]:
    """All arms, in the order of the protocol."""
    return list(dict.fromkeys(arm for _, arms in PHASES for arm in arms))


def ranking(study: Study) -> str:
    """One line per arm that is complete with both bases, the best first."""
    lines, bases, default = [], list(BASES), COMPARED[0]
    arms = [arm for arm in names() if set(bases) <= set(study.bases(arm, "sft", *COMPARED))]
    means = {arm: study.table(study.final(arm), bases, CONDITIONS).mean() for arm in arms}
    for arm in sorted(arms, key=lambda arm: -means[arm]):
        runs = [run for key, run in study.runs[arm].items() if key[3] in study.seeds]
        pairs = [(other, bases) for other in COMPARED] + [(default, [base]) for base in bases]
        lines.append(
            [
                f"`{arm}`",
                f"{means[arm]:.1f}",
                *("" if arm == o else study.difference(arm, o, chosen) for o, chosen in pairs),
                f"{study.at_equal_time(arm, bases):.1f}",
                f"{np.mean([run['tokens'] for run in runs]) / 1000:.0f}",
                f"{np.mean([run['seconds'] for run in runs]):.1f}",
            ]
        )
    header = ["arm", "accuracy", *(f"minus `{other}`" for other in COMPARED)]
    header += [f"{base}: minus `{default}`" for base in bases]
    return markdown_table([*header, "at equal time", "1,000 tokens", "CPU seconds"], lines)


def differences(study: Study, pairs: Iterable[tuple[str, str]]) -> str:
    """One line per pair of arms: over everything, per base, and per condition."""
    lines = []
    for arm, other in pairs:
        kinds = [*OVERALL, (list(BASES), WITHOUT), *BY_CONDITION]
        cells = [
            study.difference(arm, other, bases, conditions)
            if all(study.complete(a, b, conditions) for a in (arm, other) for b in bases)
            else ""
            for bases, conditions in kinds
        ]
        lines.append([f"`{arm}` minus `{other}`", *cells])
    header = ["difference", "all", *BASES, "all but good-then-bad", *CONDITIONS]
    return markdown_table(header, lines)


def over_tasks(study: Study, confirmed: Study) -> str:
    """The differences of both protocols, and of every arm to the default, over tasks."""
    arms = [arm for arm in names() if list(BASES) == study.bases(arm, COMPARED[0])]
    against = [(arm, COMPARED[0]) for arm in arms if arm != COMPARED[0]]
    first = [*JUDGED[:3], ("sft", "sft-then-rl"), *against]
    lines = [_over_tasks(study, *pair) for pair in dict.fromkeys(first)]
    lines += [
        _over_tasks(confirmed, *pair, " (confirmation)") for pair in (*JUDGED_AGAIN, *AFTERWARDS)
    ]
    return markdown_table(["difference", "all, bootstrap", "all", *BASES, *CONDITIONS], lines)


def _over_tasks(study: Study, arm: str, other: str, runs: str = "") -> list[str]:
    cells = [study.over_tasks(arm, other, *kind) for kind in [*OVERALL, *BY_CONDITION]]
    bootstrap = study.difference(arm, other, list(BASES))
    return [f"`{arm}` minus `{other}`{runs}", bootstrap, *cells]


def survives(study: Study, confirmed: Study) -> str:
    """The alarm and phi, over everything and per condition, with t intervals over tasks."""
    pairs = [(study, *JUDGED[0]), *((confirmed, *pair) for pair in (*PHI, *AFTERWARDS))]
    lines = [
        [
            f"`{arm}` minus `{other}`",
            of.difference(arm, other, list(BASES)),
            *(of.over_tasks(arm, other, *kind) for kind in [OVERALL[0], *BY_CONDITION]),
        ]
        for of, arm, other in pairs
    ]
    return markdown_table(["difference", "all, bootstrap", "all", *CONDITIONS], lines)


def judged(study: Study) -> str:
    """The differences of the protocol, and the mu of `gac-paper`."""
    mus = [run["mu"] for run in study.runs["gac-paper"].values()]
    mu = f"{min(mus):.3f} to {max(mus):.3f}"
    return f"{differences(study, JUDGED)}\n\nMean mu of a run of `gac-paper`: {mu}.\n"


def confirmation(study: Study) -> str:
    """Accuracy of the arms of the confirmation, then the differences of its protocol."""
    lines = []
    for arm in CONFIRMED:
        final = study.final(arm)
        kinds = [*OVERALL, *BY_CONDITION]
        means = [study.table(final, bases, conditions).mean() for bases, conditions in kinds]
        lines.append([f"`{arm}`", *(f"{mean:.1f}" for mean in means)])
    table = markdown_table(["arm", "all", *BASES, *CONDITIONS], lines)
    return f"{table}\n\n{differences(study, JUDGED_AGAIN)}"


def by_condition(study: Study) -> str:
    """Mean accuracy per condition: the main arms, and others with a better mean than the default.

    Over the tasks, and over the bases that the main arms have.
    """
    bases, lines = study.bases(*MAIN), []
    arms = [arm for arm in names() if bases and set(bases) <= set(study.bases(arm))]
    means = {arm: study.table(study.final(arm), bases, CONDITIONS).mean() for arm in arms}
    arms = [arm for arm in arms if arm in MAIN or means[arm] > means[COMPARED[0]]]
    for conditions in [*([c] for c in CONDITIONS), list(CONDITIONS)]:
        means = {a: study.table(study.final(a), bases, conditions).mean() for a in arms}
        cells = [f"{m:.1f}" if m < max(means.values()) else f"**{m:.1f}**" for m in means.values()]
        lines.append([conditions[0] if len(conditions) == 1 else "mean", *cells])
    return markdown_table(["demonstrations", *(f"`{arm}`" for arm in arms)], lines)


def by_cell(study: Study) -> str:
    """Mean accuracy per task and condition; for both bases, weak / mid."""
    arms = [arm for arm in names() if study.bases(arm)]
    lines = []
    for task in TASKS:
        for condition in CONDITIONS:
            cells = []
            for arm in arms:
                final = study.final(arm)
                means = [
                    f"{np.mean([final((task, base, condition, s)) for s in study.seeds]):.0f}"
                    if base in study.bases(arm)
                    else "-"
                    for base in BASES
                ]
                cells.append(" / ".join(means))
            lines.append([task, condition, *cells])
    return markdown_table(["task", "demonstrations", *(f"`{arm}`" for arm in arms)], lines)


def tuning(rows: Iterable[Row]) -> str:
    """Mean accuracy of the candidates of every tuned arm; the best one is chosen."""
    lines = []
    for arm, means in tuning_means(rows).items():
        best = max(means, key=lambda i: means[i])
        shown = [f"{100 * m:.1f}" for m in means.values()]
        shown[best] = f"**{shown[best]}**"
        lines.append(f"`{arm}` {' / '.join(shown)}")
    return "; ".join(lines) + "."


def earlier(folder: Path) -> str:
    """Arms of the earlier studies against the best single constant, or against another arm."""
    lines = []
    for name, arm in EARLIER.items():
        lines.append(_against(folder, name, arm, lambda scenario: True))
    kinds: dict[str, Callable[[str], bool]] = {
        "all": lambda scenario: True,
        "good demonstrations do not turn bad in mid-run": lambda s: s not in CHANGING,
    }
    for kind, chosen in kinds.items():
        arms = ("constant-alarm", "named-sources")
        lines += [_against(folder, "fourth", arm, chosen, kind) for arm in arms]
    lines.append(
        _against(folder, "third", "gate-alarm", lambda scenario: True, others=["alarm-only"])
    )
    header = ["study", "arm", "scenarios", "seeds", "accuracy", "compared with", "difference"]
    return markdown_table(header, lines)


def _against(
    folder: Path,
    name: str,
    arm: str,
    chosen: Callable[[str], bool],
    kind: str = "complete ones",
    others: Sequence[str] = (),
) -> list[str]:
    finals = json.loads((folder / f"{name}.json").read_text())["finals"]
    others = others or [key for key in finals["base"] if key.startswith("mu-0")]
    rows = [row for scenario, row in finals.items() if chosen(scenario)]
    rows = [r for r in rows if all(None not in r.get(key, [None]) for key in [arm, *others])]
    means = {key: 100 * np.mean([row[key] for row in rows], 0) for key in [arm, *others]}
    best = max(others, key=lambda key: means[key].mean())
    values = (means[arm] - means[best])[None]
    low, high = interval(values)
    return [
        name,
        f"`{arm}`",
        f"{len(rows)}, {kind}",
        f"{values.size}",
        f"{means[arm].mean():.1f}",
        f"{means[best].mean():.1f} (`{best}`)",
        f"{values.mean():+.1f} [{low:+.1f}, {high:+.1f}]",
    ]


def progress(study: Study) -> str:
    """Finished runs, base accuracies, and the arms that are not complete."""
    runs = sum(map(len, study.runs.values()))
    planned = sum(len(arms) for _, arms in PHASES) * len(TASKS) * len(CONDITIONS) * len(SEEDS)
    planned -= 2 * len(TASKS) * 2 * len(SEEDS)  # sources have names in two of four conditions
    codes = sorted({run["code"] for own in study.runs.values() for run in own.values()})
    text = f"{runs:,} of {planned:,} runs are finished, with the code of commits "
    text += f"{' and '.join(codes)}."
    if study.seeds != SEEDS:
        text += f" This is an interim report of the first {len(study.seeds)} of {len(SEEDS)} seeds."
    for base in BASES:
        missing = [arm for arm in names() if not study.complete(arm, base, _conditions(arm))]
        if missing:
            text += f" Not complete with `{base}`: {', '.join(f'`{arm}`' for arm in missing)}."
    starts = {
        (key[0], key[1]): f"{100 * run['accuracy'][0]:.0f}"
        for own in study.runs.values()
        for key, run in own.items()
    }
    shown = [f"{t} {' / '.join(starts.get((t, b), '-') for b in BASES)}" for t in TASKS]
    return f"{text} Accuracy of the bases (weak / mid), in percent: {', '.join(shown)}.\n"


def _conditions(arm: str) -> Sequence[str]:
    return CONDITIONS[1:3] if arm == "named-sources" else CONDITIONS


def two_turns(rows: Sequence[Row]) -> str:
    """Mean accuracy of the arms on the task with two turns, over the complete seeds."""
    runs = {(r["base"], r["condition"], r["arm"], r["seed"]): r["accuracy"][-1] for r in rows}
    size = len(BASES) * len(CONDITIONS) * len(TURNS)
    seeds = [s for s in SEEDS if sum(key[-1] == s for key in runs) == size]
    lines = []
    for conditions in [*([c] for c in CONDITIONS), list(CONDITIONS)]:
        cells = []
        for arm in TURNS:
            values = [[runs[b, c, arm, s] for c in conditions for s in seeds] for b in BASES]
            cells.append(" / ".join(f"{100 * np.mean(row):.1f}" for row in values))
        lines.append([conditions[0] if len(conditions) == 1 else "mean", *cells])
    table = markdown_table(["demonstrations", *(f"`{arm}`" for arm in TURNS)], lines)
    shown = f"Means over {len(seeds)} of {len(SEEDS)} seeds; {len(rows)} of {size * len(SEEDS)} "
    return f"{table}\n\n{shown}runs are finished.\n"


def sections(folder: Path = RESULTS) -> dict[str, str]:
    """Marker -> text of every generated part of the page."""
    study, tuned = Study(finished(folder / "final.jsonl")), finished(folder / "tuning.jsonl")
    rows = finished(folder / "confirmation.jsonl")
    confirmed = Study(rows, CONFIRMATION_SEEDS, CONFIRMED)
    return {
        "progress": progress(study),
        "ranking": ranking(study),
        "judged": judged(study),
        "conditions": by_condition(study),
        "tasks": over_tasks(study, confirmed),
        "survives": survives(study, confirmed),
        "cells": by_cell(study),
        "confirmation": confirmation(confirmed),
        "tuning": tuning(tuned),
        "earlier": earlier(folder),
        "turns": two_turns(finished(folder / "turns.jsonl")),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Update or check the pages; returns the exit code."""
    return update_pages("research.study_results", __doc__, PAGES, sections(), argv)


if __name__ == "__main__":
    sys.exit(main())
