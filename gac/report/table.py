"""The results tables: one row per group, mean and standard deviation over its seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gac.evaluation.table import align_columns

from .groups import Group, caution, group_runs
from .reading import Columns, Run, shared_setting
from .statistics import final_and_best, kl_area, large_mu_events, mean_sd, total, variance

DEFAULT_WINDOW = 10  # the controller's default update_every


@dataclass(frozen=True)
class Context:
    """Settings that all rows share, so that their numbers can be compared."""

    window: int
    """Length of a controller interval in steps."""
    kl_target: float | None


@dataclass(frozen=True)
class Column:
    """One table column."""

    key: str
    title: str
    scale: float = 1.0
    """Display scale factor, e.g. 100 for a percentage."""
    decimals: int | None = None
    """Decimal places; None: three significant digits of the mean."""


FINAL = Column("final", "final accuracy %", 100, 1)
ACCURACY = (
    Column("start", "start accuracy %", 100, 1),
    FINAL,
    Column("best", "best accuracy %", 100, 1),
)
STABILITY = (
    Column("kl_area", "KL area"),
    Column("kl_excess", "KL area above target"),
    Column("mu_events", "large μ changes %", 100, 1),
    Column("length_variance", "length variance"),
    Column("tokens", "tokens (thousands)", 1e-3, 0),
    Column("minutes", "minutes"),
)


@dataclass(frozen=True)
class Table:
    """One block of results: cells[group][column] is (mean, sd)."""

    title: str
    columns: Sequence[Column]
    cells: Sequence[Sequence[tuple[float, float]]]


def context_of(runs: Sequence[Run]) -> Context:
    """The page's controller interval and KL target; the target is None if the runs differ in it."""
    window = shared_setting(runs, "update_every")
    target = shared_setting(runs, "kl_target")
    return Context(int(window) if window else DEFAULT_WINDOW, target)


def summarize(run: Run, context: Context) -> dict[str, float]:
    """Column key -> value for one run; nan if the run did not record the data for it.

    In addition to the column keys, `accuracy/<split>` is the final accuracy on each split and
    `start/<task>` the accuracy before training on each additional task.
    """
    metrics, steps = run.metrics, run.metrics["step"]
    # the evaluation before the first step is a baseline, not a result
    trained = run.evals["step"] > 0
    before, evals = ({k: v[rows] for k, v in run.evals.items()} for rows in (~trained, trained))
    final, best, _ = final_and_best(evals["step"], field(evals, "accuracy"))
    kl, target = field(metrics, "kl"), context.kl_target
    events, windows = large_mu_events(steps, field(metrics, "mu"), context.window)

    def last(rows: Columns, name: str) -> float:
        return final_and_best(rows["step"], field(rows, name))[0]

    by_name = {f"accuracy/{split}": last(evals, f"accuracy/{split}") for split in run.splits}
    by_name |= {f"start/{task}": last(before, f"accuracy/{task}") for task in run.tasks}
    return by_name | {
        "start": last(before, "accuracy"),
        "final": final,
        "best": best,
        "kl_area": kl_area(steps, kl),
        "kl_excess": math.nan if target is None else kl_area(steps, kl, target),
        "mu_events": events / windows if windows else math.nan,
        "length_variance": variance(field(metrics, "completions/mean_length")),
        "tokens": total(field(metrics, "tokens")),
        "minutes": total(field(metrics, "seconds")) / 60,
    }


def field(columns: Columns, name: str) -> np.ndarray:
    """A column, or an all-nan column if no row has it."""
    return columns[name] if name in columns else np.full(len(columns["step"]), math.nan)


def tables(groups: Sequence[Group], context: Context) -> list[Table]:
    """Tables for accuracy (overall and per split), additional tasks, and stability and cost.

    Columns without numbers are omitted.
    """
    summaries = [[summarize(run, context) for run in group.runs] for group in groups]
    splits = list(dict.fromkeys(split for group in groups for split in group.splits))
    tasks = list(dict.fromkeys(task for group in groups for task in group.tasks))
    # splits of additional tasks are only plotted
    main_splits = [s for s in splits if s.partition("/")[0] not in tasks]
    by_split = [Column(f"accuracy/{name}", f"final {name} %", 100, 1) for name in main_splits]
    by_task = [
        Column(f"{key}/{name}", f"{when} {name} %", 100, 1)
        for name in tasks
        for key, when in (("start", "start"), ("accuracy", "final"))
    ]
    blocks = (
        ("Accuracy", (*ACCURACY, *by_split)),
        ("Additional tasks", by_task),
        ("Stability and cost", STABILITY),
    )
    result = []
    for title, columns in blocks:
        known = [
            column
            for column in columns
            if any(math.isfinite(run.get(column.key, math.nan)) for s in summaries for run in s)
        ]
        rows = [
            [mean_sd([run.get(column.key, math.nan) for run in runs]) for column in known]
            for runs in summaries
        ]
        if known:
            result.append(Table(title, known, rows))
    return result


def write_cell(cell: tuple[float, float], column: Column) -> str:
    """`mean ± sd` with equal decimals; only the mean for a single seed; a dash for a nan mean."""
    mean, sd = cell[0] * column.scale, cell[1] * column.scale
    if not math.isfinite(mean):
        return "–"
    decimals = column.decimals
    if decimals is None:
        decimals = min(6, max(0, 2 - math.floor(math.log10(abs(mean))))) if mean else 0
    text = f"{mean:,.{decimals}f}"
    return f"{text} ± {sd:,.{decimals}f}" if math.isfinite(sd) else text


def progress(group: Group) -> str:
    """Number of steps done, and the planned number if any run of the group is unfinished."""
    done = [run.steps_done for run in group.runs]
    text = str(done[0]) if len(set(done)) == 1 else f"{min(done)} to {max(done)}"
    unfinished = [r for r in group.runs if r.steps_planned and r.steps_done < r.steps_planned]
    return f"{text} of {unfinished[0].steps_planned}" if unfinished else text


def runs_table(runs: Sequence[Run]) -> str:
    """The tables as aligned plain text for a terminal."""
    groups = group_runs(runs)
    texts = [_aligned(table, groups) for table in tables(groups, context_of(runs))]
    return "\n\n".join([*texts, *filter(None, [caution(groups).strip()])])


def _aligned(table: Table, groups: Sequence[Group]) -> str:
    lines = [[table.title, "seeds", "steps", *(column.title for column in table.columns)]]
    for group, row in zip(groups, table.cells, strict=True):
        numbers = [write_cell(c, column) for c, column in zip(row, table.columns, strict=True)]
        lines.append([group.label, str(len(group.runs)), progress(group), *numbers])
    return align_columns(lines)
