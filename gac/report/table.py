"""The results table: one row per group, mean and standard deviation over its seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gac.report.groups import Group, group_runs
from gac.report.reading import Columns, Run, shared_setting
from gac.report.statistics import (
    final_and_best,
    kl_area,
    large_mu_events,
    mean_sd,
    total,
    variance,
)

DEFAULT_WINDOW = 10  # the controller's default update_every


@dataclass(frozen=True)
class Context:
    """Settings that all rows share, so that their numbers can be compared."""

    window: int
    """Steps of one controller interval."""
    kl_target: float | None


@dataclass(frozen=True)
class Column:
    """One quantity of the table."""

    key: str
    title: str
    write: Callable[[float], str]


def percent(value: float) -> str:
    """A share as a percentage with one decimal, without the sign."""
    return f"{100 * value:.1f}"


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:.0f}"


def _significant(value: float) -> str:
    """Three significant digits without an exponent where a person would not use one."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, digits)}f}" if -3 <= digits <= 6 else f"{value:.2e}"


COLUMNS = (
    Column("final", "final acc. %", percent),
    Column("best", "best acc. %", percent),
    Column("kl_area", "KL area", _significant),
    Column("kl_excess", "KL area above target", _significant),
    Column("mu_events", "large μ changes %", percent),
    Column("length_variance", "length variance", _significant),
    Column("tokens", "tokens", _count),
    Column("minutes", "minutes", _significant),
)


def context_of(runs: Sequence[Run]) -> Context:
    """The controller interval and KL target of the page; a target only if the runs agree on it."""
    window = shared_setting(runs, "update_every")
    target = shared_setting(runs, "kl_target")
    return Context(int(window) if window else DEFAULT_WINDOW, target)


def summarise(run: Run, context: Context) -> dict[str, float]:
    """Column key -> number of one run, nan where the run did not record what it needs."""
    metrics, evals = run.metrics, run.evals
    steps = metrics["step"]
    final, best, _ = final_and_best(evals["step"], field(evals, "accuracy"))
    kl, target = field(metrics, "kl"), context.kl_target
    events, windows = large_mu_events(steps, field(metrics, "mu"), context.window)
    return {
        "final": final,
        "best": best,
        "kl_area": kl_area(steps, kl),
        "kl_excess": math.nan if target is None else kl_area(steps, kl, target),
        "mu_events": events / windows if windows else math.nan,
        "length_variance": variance(field(metrics, "response_length")),
        "tokens": total(field(metrics, "tokens")),
        "minutes": total(field(metrics, "seconds")) / 60,
    }


def field(columns: Columns, name: str):
    """A column, or one of nan when no row has it."""
    return columns[name] if name in columns else columns["step"] * math.nan


def cells(groups: Sequence[Group], context: Context) -> list[dict[str, tuple[float, float]]]:
    """Per group: column key -> (mean, sd) over its runs."""
    rows = []
    for group in groups:
        runs = [summarise(run, context) for run in group.runs]
        rows.append({c.key: mean_sd([run[c.key] for run in runs]) for c in COLUMNS})
    return rows


def split_cells(groups: Sequence[Group]) -> tuple[list[str], list[list[tuple[float, float]]]]:
    """(split names, per group the (mean, sd) of the final accuracy on each split)."""
    names = list(dict.fromkeys(split for group in groups for split in group.splits))

    def final(run: Run, split: str) -> float:
        return final_and_best(run.evals["step"], field(run.evals, f"accuracy/{split}"))[0]

    return names, [
        [mean_sd([final(run, split) for run in group.runs]) for split in names] for group in groups
    ]


def known_columns(rows: Sequence[Mapping[str, tuple[float, float]]]) -> list[Column]:
    """The columns in which at least one row has a number."""
    return [c for c in COLUMNS if any(math.isfinite(row[c.key][0]) for row in rows)]


def write_cell(cell: tuple[float, float], write: Callable[[float], str]) -> str:
    """`mean ± sd`, the mean alone for a single seed, a dash for nothing."""
    mean, sd = cell
    if not math.isfinite(mean):
        return "–"
    return f"{write(mean)} ± {write(sd)}" if math.isfinite(sd) else write(mean)


def progress(group: Group) -> str:
    """Steps done, and of how many when a run of the group has not got there."""
    done = [run.steps_done for run in group.runs]
    text = str(done[0]) if len(set(done)) == 1 else f"{min(done)}–{max(done)}"
    behind = [r for r in group.runs if r.steps_planned and r.steps_done < r.steps_planned]
    return f"{text} of {behind[0].steps_planned}" if behind else text


def results_table(runs: Sequence[Run]) -> str:
    """The table as aligned plain text for a terminal, final accuracy per split included."""
    groups = group_runs(runs)
    rows = cells(groups, context_of(runs))
    columns = known_columns(rows)
    splits, split_rows = split_cells(groups)
    lines = [["run", "seeds", "steps", *(c.title for c in columns), *(f"{s} %" for s in splits)]]
    for group, row, by_split in zip(groups, rows, split_rows, strict=True):
        numbers = [write_cell(row[c.key], c.write) for c in columns]
        numbers += [write_cell(cell, percent) for cell in by_split]
        lines.append([group.label, str(len(group.runs)), progress(group), *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]
    return "\n".join([aligned[0], "-" * max(map(len, aligned)), *aligned[1:]])
