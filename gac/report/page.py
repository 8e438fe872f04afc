"""The HTML page: one file with everything in it, that needs no network and no script."""

import base64
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import metadata
from pathlib import Path

from gac.config import to_yaml

from .groups import Group, differences
from .plots import COLOURS, DASHES, MIXING, TRAINING, Panel, evaluation_panels
from .reading import Run
from .statistics import mean_sd
from .style import CSS
from .table import FINAL, Column, Context, Table, progress, summarise, tables, write_cell
from .words import HOW_TO_READ, SYMBOLS, definitions

PACKAGES = ("gac", "torch", "transformers", "accelerate", "numpy")


def render(groups: Sequence[Group], context: Context, plots: Mapping[str, Path]) -> str:
    """The whole page; plots: panel key -> PNG, which is put into the page itself."""
    labels = ", ".join(group.label for group in groups)
    body = [
        f"<header><h1>{escape(_title(groups))}</h1>{_facts(groups)}</header>",
        f"<p class='lead'>{escape(headline(groups, context))}</p>",
        _section("Results", _results(groups, context)),
        _section("Held-out accuracy", _panels(evaluation_panels(groups), plots)),
        _section("Training", _panels(TRAINING, plots)),
        _section("Mixing", _panels(MIXING, plots)),
        _section("How to read this page", _how_to_read(context)),
        _section("The runs", _runs(groups)),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(labels)}: training report</title><style>{CSS}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def headline(groups: Sequence[Group], context: Context) -> str:
    """The result in one or two sentences, with its uncertainty; whoever is ahead."""
    runs = [[summarise(run, context)["final"] for run in group.runs] for group in groups]
    start = _start(groups, context)
    scored = [(mean_sd(values), group) for values, group in zip(runs, groups, strict=True)]
    scored = [item for item in scored if math.isfinite(item[0][0])]
    scored.sort(key=lambda item: -item[0][0])
    if not scored:
        return "None of these runs has been evaluated yet."
    (best, sd), leader = scored[0]
    if len(scored) == 1:
        return f"Final accuracy: {write_cell((best, sd), FINAL)} %.{start}"
    (second, second_sd), runner_up = scored[1]
    words = (
        f"Highest final accuracy: {leader.label} with {write_cell((best, sd), FINAL)} %, "
        f"{100 * (best - second):.1f} points above {runner_up.label} ({100 * second:.1f} %). "
    )
    if not (math.isfinite(sd) and math.isfinite(second_sd)):
        return words + "Without several seeds for both, a small gap is not evidence." + start
    noise = math.hypot(sd, second_sd)
    verdict = "more than" if best - second > noise else "within"
    return (
        words
        + f"That is {verdict} the spread over seeds: both sd together are {100 * noise:.1f}.{start}"
    )


def _start(groups: Sequence[Group], context: Context) -> str:
    """What the model could do before training, where all runs agree on it."""
    known = [summarise(run, context)["start"] for group in groups for run in group.runs]
    texts = {write_cell((value, math.nan), FINAL) for value in known}
    return f" The start model has {texts.pop()} %." if len(texts) == 1 and known[0] >= 0 else ""


def _title(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return f"Training report: {groups[0].label}"
    names = [group.label for group in groups]
    return f"Comparison: {', '.join(names[:-1])} and {names[-1]}"


def _facts(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({seed for group in groups for seed in group.seeds})
    models = dict.fromkeys(filter(None, map(_model, runs)))
    written = [f.stat().st_mtime for r in runs for f in r.path.glob("*.jsonl")]
    facts = [("Runs", str(len(runs))), ("Seeds", ", ".join(map(str, seeds)) or "not recorded")]
    if len(models) == 1:
        facts.append(("Model", next(iter(models))))
    if written:
        facts.append(("Last trained", f"{datetime.fromtimestamp(max(written)):%Y-%m-%d %H:%M}"))
    facts.append(("Page written", f"{datetime.now():%Y-%m-%d %H:%M}, {_versions()}"))
    items = "".join(f"<li><b>{escape(name)}</b> {escape(text)}</li>" for name, text in facts)
    return f"<ul class='facts'>{items}</ul>"


def _model(run: Run) -> str:
    model = run.config.get("model")
    return str((model.get("path") if isinstance(model, Mapping) else model) or "")


def _versions() -> str:
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n" if content else ""


def _results(groups: Sequence[Group], context: Context) -> str:
    blocks = "".join(_table(table, groups) for table in tables(groups, context))
    repeated = any(len(group.runs) > 1 for group in groups)
    note = "± is the standard deviation over seeds. " if repeated else ""
    lengths = {run.steps_done for group in groups for run in group.runs}
    if len(lengths) > 1:
        note += "Areas and sums of runs with fewer steps cover fewer steps. "
    return f"{blocks}<p class='note'>{note}Each column is defined at the end of the page.</p>"


def _table(table: Table, groups: Sequence[Group]) -> str:
    heads = [table.title, "seeds", "steps", *(column.title for column in table.columns)]
    head = "".join(f"<th scope='col'>{escape(text)}</th>" for text in heads)
    lines = []
    for index, (group, row) in enumerate(zip(groups, table.cells, strict=True)):
        name = f"<th scope='row'>{_swatch(index)}{escape(group.label)}</th>"
        plain = f"<td>{len(group.runs)}</td><td>{escape(progress(group))}</td>"
        numbers = [
            _cell(cell, column, is_best=len(groups) > 1 and _is_best(table, i, cell))
            for i, (cell, column) in enumerate(zip(row, table.columns, strict=True))
        ]
        lines.append(f"<tr>{name}{plain}{''.join(numbers)}</tr>")
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _is_best(table: Table, index: int, cell: tuple[float, float]) -> bool:
    """Whether a cell has the highest accuracy of its column; other columns have no simple best."""
    if not table.columns[index].key.startswith(("final", "best", "accuracy/")):
        return False
    return cell[0] == max((row[index][0] for row in table.cells), key=_known_first)


def _known_first(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _cell(cell: tuple[float, float], column: Column, is_best: bool) -> str:
    mean, plus_minus, sd = write_cell(cell, column).partition(" ± ")
    spread = f" <span class='sd'>± {sd}</span>" if plus_minus else ""
    return f"<td{' class=best' if is_best else ''}>{mean}{spread}</td>"


def _swatch(index: int) -> str:
    """The group's line as the figures draw it; its marker is left to the figures' own legend."""
    dashes = " ".join(f"{2 * length:g}" for length in DASHES[index % len(DASHES)])
    return (
        "<svg class='swatch' viewBox='0 0 46 14' aria-hidden='true'><line x1='1' y1='7' x2='45' "
        f"y2='7' stroke='{COLOURS[index % len(COLOURS)]}' stroke-width='3.4' "
        f"stroke-dasharray='{dashes or 'none'}'/></svg>"
    )


def _panels(panels: Sequence[Panel], plots: Mapping[str, Path]) -> str:
    shown = [_figure(panel, plots[panel.key]) for panel in panels if panel.key in plots]
    three = " three" if len(shown) == 3 else ""
    missing = [panel.title for panel in panels if panel.key not in plots]
    note = f"<p class='note'>Not recorded: {escape(', '.join(missing))}.</p>" if missing else ""
    return (f"<div class='panels{three}'>{''.join(shown)}</div>" if shown else "") + note


def _figure(panel: Panel, image: Path) -> str:
    data = base64.b64encode(image.read_bytes()).decode("ascii")
    return (
        f"<figure><img alt='{escape(panel.title)} over optimiser steps' "
        f"src='data:image/png;base64,{data}'><figcaption>{escape(panel.words)}</figcaption></figure>"
    )


def _how_to_read(context: Context) -> str:
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in HOW_TO_READ)
    return (
        f"{paragraphs}<div class='two'><div><h3>Symbols</h3>{_list(SYMBOLS)}</div>"
        f"<div><h3>Numbers of the table</h3>{_list(definitions(context))}</div></div>"
    )


def _list(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in entries)
    return f"<dl>{items}</dl>"


def _runs(groups: Sequence[Group]) -> str:
    parts = [_differences(groups)] if len(groups) > 1 else []
    for group in groups:
        for run in group.runs:
            state = f"{run.steps_done} steps"
            if run.steps_planned and run.steps_done < run.steps_planned:
                state += f" of {run.steps_planned}: unfinished or still running"
            if run.unreadable:
                state += f"; {run.unreadable} unreadable line(s) skipped"
            seed = "" if run.seed is None else f", seed {run.seed}"
            summary = f"<b>{escape(group.label)}</b>{seed}: {escape(state)}"
            config = to_yaml(dict(run.config)) if run.config else "no config.yaml"
            parts.append(
                f"<details><summary>{summary} <code>{escape(str(run.path))}</code></summary>"
                f"<pre>{escape(config)}</pre></details>"
            )
    return "".join(parts)


def _differences(groups: Sequence[Group]) -> str:
    rows = differences(groups)
    if not rows:
        return ""
    head = "".join(f"<th scope='col'>{escape(group.label)}</th>" for group in groups)
    lines = []
    for key, values in rows.items():
        texts = ["–" if value is None else to_yaml(value, inline=True) for value in values]
        line = "".join(f"<td>{escape(text)}</td>" for text in texts)
        lines.append(f"<tr><th scope='row'><code>{escape(key)}</code></th>{line}</tr>")
    return (
        "<details><summary>Settings in which they differ</summary><div class='scroll'><table>"
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        "</details>"
    )
