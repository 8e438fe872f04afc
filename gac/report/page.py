"""The HTML report: one self-contained file that needs no network and no JavaScript."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from gac.config import to_yaml
from gac.errors import import_extra

from .answers import before_and_after
from .evaluations import Evaluation, draw, sections
from .groups import Group, caution, differences
from .plots import (
    COLORS,
    DASHES,
    MIXING,
    OPTIMIZATION,
    Panel,
    embedded,
    evaluation_panels,
    has_data,
    training_panels,
    unchanging,
)
from .reading import Run, read_lines, time_shares
from .statistics import LARGE_CHANGE
from .table import FINAL, Table, cell, progress, summarize, tables, write_cell

PACKAGES = ("gac-kernels", "torch", "transformers", "accelerate", "numpy")


def render(
    groups: Sequence[Group],
    window: int,
    plots: Mapping[str, Path],
    evaluations: Sequence[Evaluation] = (),
) -> str:
    """Render the whole page; plots: panel key -> SVG, which is embedded in the page."""
    panels = {
        "Held-out accuracy": evaluation_panels(groups),
        "Training": training_panels(groups),
        "Optimization": OPTIMIZATION,
        "Mixing": MIXING,
    }
    return render_template(
        "page.html.j2",
        groups=groups,
        title=_title(groups),
        facts=_facts(groups),
        headline=headline(groups, window),
        answers=before_and_after(groups),
        tables=[_table(table, groups) for table in tables(groups, window)],
        note=_note(groups),
        figures=[(name, _figures(section, groups, plots)) for name, section in panels.items()],
        samples=samples(groups),
        how_to_read=HOW_TO_READ,
        symbols=SYMBOLS,
        definitions=definitions(window),
        differences=_differences(groups),
        runs=_runs(groups),
        evaluations=sections(evaluations),
        figure=draw(evaluations) if evaluations else None,
    )


def render_evaluations(evaluations: Sequence[Evaluation]) -> str:
    """Render a page for `gac eval` results only."""
    models = list(dict.fromkeys(evaluation.model for evaluation in evaluations))
    return render_template(
        "evaluation.html.j2",
        title=f"Evaluation: {', '.join(models)}",
        evaluations=sections(evaluations),
        figure=draw(evaluations),
    )


def render_template(template: str, **values: Any) -> str:
    """Render a template of this folder with escaped `values`."""
    jinja2 = import_extra("jinja2", "the report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template).render(**values)


def headline(groups: Sequence[Group], window: int) -> str:
    """Summarize the result and its uncertainty in one or two sentences."""
    summaries = [[summarize(run, window) for run in group.runs] for group in groups]
    tasks = list(dict.fromkeys(task for group in groups for task in group.tasks))
    key, where, start = "final", "", _start_sentence(groups, window)
    if tasks and all(math.isnan(run["final"]) for group in summaries for run in group):
        key, where = f"accuracy/{tasks[0]}", f" on {tasks[0]}"
    cells = [(cell(runs, key), group) for runs, group in zip(summaries, groups, strict=True)]
    known = (item for item in cells if math.isfinite(item[0][0]))
    scored = sorted(known, key=lambda item: -item[0][0])
    if not scored:
        return "None of these runs has been evaluated yet."
    (first, leader), *others = scored
    if not others:
        return f"Final accuracy{where}: {write_cell(first, FINAL, '%')}.{start}"
    (second, *_), runner_up = others[0]
    gap = first[0] - second
    text = caution(groups) + (
        f"Highest final accuracy{where}: {leader.label} with {write_cell(first, FINAL, '%')}, "
        f"{100 * gap:.1f} points above {runner_up.label} ({100 * second:.1f}%). "
    )
    # a cell with two ends of an interval is of a single run
    spread = math.hypot(*(c[1] if len(c) == 2 else math.nan for c, _ in scored[:2]))
    if math.isnan(spread):
        return text + "Without several seeds for each, a small gap is not evidence." + start
    relation = "more than" if gap > spread else "within"
    text += f"That is {relation} the spread over seeds: the combined standard deviation is "
    return f"{text}{100 * spread:.1f}.{start}"


def _start_sentence(groups: Sequence[Group], window: int) -> str:
    """A sentence on the accuracy before training, if all runs agree on it."""
    known = [cell([summarize(run, window)], "start") for group in groups for run in group.runs]
    texts = {write_cell(start, FINAL, "%") for start in known}
    return f" The initial model has {texts.pop()}." if len(texts) == 1 and texts != {"–"} else ""


def _title(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return f"Training report: {groups[0].label}"
    names = [group.label for group in groups]
    return f"Comparison: {', '.join(names[:-1])} and {names[-1]}"


def _facts(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Facts for the page header, as (name, text) pairs."""
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({seed for group in groups for seed in group.seeds})
    models = dict.fromkeys(filter(None, map(_model, runs)))
    modified = [f.stat().st_mtime for r in runs for f in r.path.glob("*.jsonl")]
    facts = [
        ("Runs", str(len(runs))),
        ("Seeds" if len(seeds) > 1 else "Seed", ", ".join(map(str, seeds)) or "not recorded"),
    ]
    if len(models) == 1:
        facts.append(("Model", next(iter(models))))
    if modified:
        facts.append(("Last trained", f"{datetime.fromtimestamp(max(modified)):%Y-%m-%d %H:%M}"))
    facts.append(("Generated", f"{datetime.now():%Y-%m-%d %H:%M}, {_versions()}"))
    return facts


def _model(run: Run) -> str:
    model = run.config.get("model")
    return str((model.get("path") if isinstance(model, Mapping) else model) or "")


def _versions() -> str:
    versions = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


def _note(groups: Sequence[Group]) -> str:
    """Notes below the tables."""
    lengths = {run.steps_done for group in groups for run in group.runs}
    note = "± is the standard deviation over seeds, brackets are the 95% interval of one run. "
    shorter = "Runs have different lengths; areas and sums of shorter runs cover fewer steps. "
    return note + (shorter if len(lengths) > 1 else "")


def _table(table: Table, groups: Sequence[Group]) -> dict[str, Any]:
    """Headers and rows of one table; each row has the line style of its group in the figures."""
    rows = []
    for index, (group, cells) in enumerate(zip(groups, table.cells, strict=True)):
        dashes = " ".join(f"{2 * length:g}" for length in DASHES[index % len(DASHES)])
        rows.append(
            {
                "label": group.label,
                "seeds": group.size,
                "progress": progress(group),
                "color": COLORS[index % len(COLORS)],
                "dashes": dashes or "none",
                "cells": [
                    _cell(table, index, cell, len(groups) > 1) for index, cell in enumerate(cells)
                ],
            }
        )
    columns = [table.title, "seeds", "steps", *(column.title for column in table.columns)]
    return {"columns": columns, "rows": rows}


def _cell(table: Table, index: int, cell: tuple[float, ...], compared: bool) -> dict[str, Any]:
    """A cell's texts, and whether it has the highest accuracy in its column."""
    column, cells = table.columns[index], [row[index][0] for row in table.cells]
    mean, _, spread = write_cell(cell, column).partition(" ")
    # other columns have no clear best
    is_accuracy = column.key.startswith(("final", "best", "accuracy/"))
    best = compared and is_accuracy and cell[0] == max(filter(math.isfinite, cells))
    return {"mean": mean, "spread": spread, "best": best}


def _figures(
    panels: Sequence[Panel], groups: Sequence[Group], plots: Mapping[str, Path]
) -> dict[str, Any]:
    """The panels with a plot, embedded in the page; sentences on, or titles of, those without."""
    recorded = [panel for panel in panels if has_data(panel, groups)]
    shown = [
        {
            "title": panel.title,
            "caption": panel.caption,
            "url": embedded(plots[panel.key].read_bytes()),
        }
        for panel in panels
        if panel.key in plots
    ]
    return {
        "shown": shown,
        "unchanging": [text for panel in recorded if (text := unchanging(panel, groups))],
        "missing": [panel.title for panel in panels if panel not in recorded],
    }


def _runs(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Each run's label, progress and configuration."""
    rows = []
    for group in groups:
        for run in group.runs:
            state = f"{run.steps_done} steps"
            if run.steps_planned and run.steps_done < run.steps_planned:
                state += f" of {run.steps_planned} (unfinished or still running)"
            if run.unreadable:
                state += f"; {run.unreadable} unreadable line(s) skipped"
            if shares := time_shares(run):
                state += f"; {shares}"
            rows.append(
                {
                    "label": group.label,
                    "seed": "" if run.seed is None else f", seed {run.seed}",
                    "state": state,
                    "path": str(run.path),
                    "config": to_yaml(dict(run.config)) if run.config else "no config.yaml",
                }
            )
    return rows


def _differences(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Each key in which the groups differ, with its value in each group."""
    return [
        (key, ["–" if value is None else to_yaml(value, inline=True) for value in values])
        for key, values in differences(groups).items()
    ]


def read_samples(folder: Path) -> list[Mapping[str, Any]]:
    """The first and the last entry of samples.jsonl, which the report shows side by side."""
    entries = {row["step"]: row for row in read_lines(folder / "samples.jsonl") if row}
    rows = [entries[step] for step in sorted(entries)]
    return rows if len(rows) < 2 else [rows[0], rows[-1]]


def samples(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Each group's label and the samples of its first run; groups without samples are omitted."""
    return [
        {"label": group.label, "entries": entries}
        for group in groups
        if (entries := read_samples(group.runs[0].path))
    ]


HOW_TO_READ = (
    "Each color, line style and marker stands for one experiment throughout the page. "
    "Runs that differ only in their seed form one experiment: the line is their mean, and the band "
    "spans the lowest to the highest seed, over the steps that all of them have completed.",
    "Below the accuracies, except for μ and the learning rate, the bold line is smoothed "
    "(exponential average over a twelfth of the longest run); the faint trace behind a single run "
    "shows the recorded values. The vertical axes cover the middle 98% of these, so isolated "
    "spikes may be cut off. The bars of the held-out accuracy of a single run are its 95% "
    "intervals.",
    "Start with the table and the held-out accuracy: they show which experiment is better. The "
    "training panels show how training progressed; the mixing panels show what the controller "
    "measured and did. A gap smaller than the ± next to the numbers is not evidence.",
)

SYMBOLS = (
    ("μ", "mixing weight: the loss is (1 − μ) × policy-gradient term + μ × demonstration term"),
    ("μ*", "the weight that minimizes the estimated error of the mixed gradient"),
    ("prior", "the schedule, fixed before the run, that μ is pulled towards"),
    ("α", "how strongly μ* favors the demonstrations; adjusted to keep the KL near its target"),
    ("σₛ²", "variance of the demonstration signal (SFT: supervised fine-tuning)"),
    ("σᵣ²", "variance of the reward signal (RL: reinforcement learning)"),
    ("Δg̃²", "disagreement: how differently the two signals weigh the same tokens, 2 (1 − ρ)"),
    ("KL", "distance of the policy from the reference model, in nats per token"),
    ("entropy", "spread of the next-token distribution, in nats per token"),
)


def definitions(window: int) -> list[tuple[str, str]]:
    """Definitions of the table columns, as (name, definition) pairs."""
    return [
        ("start accuracy", "held-out accuracy of the model before the first optimizer step"),
        (
            "final, best accuracy",
            "held-out accuracy at the last evaluation, and the highest after the start (selected "
            "in hindsight, so slightly optimistic)",
        ),
        (
            "KL area",
            "area under the KL curve over optimizer steps (trapezoid rule): small when the "
            "policy stays near its reference; unit: nats per token × steps",
        ),
        (
            "large μ changes",
            f"fraction of consecutive controller intervals ({window} steps each) over which μ "
            f"changed by more than {LARGE_CHANGE:g}. Measured over intervals because a cap on the "
            "change per step (0.01 by default) rules out larger single steps. A steep prior also "
            "counts, so this measures movement, not only instability",
        ),
        ("length variance", "population variance, over steps, of the mean response length"),
        (
            "tokens, minutes",
            "sums over all optimizer steps; minutes are wall-clock time spent in steps, excluding "
            "evaluation and loading",
        ),
        ("±", "sample standard deviation over seeds; absent for a single seed"),
        ("[low, high]", "95% interval of the accuracy of a single run, over its prompts"),
    ]
