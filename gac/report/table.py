"""The results tables: one row per group, mean and standard deviation over its seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gac.evaluation.table import align_columns

from .groups import Group, caution, group_runs
from .health import (
    STAGES,
    alpha_stability,
    cross_covariance,
    field,
    smoothing,
    stages,
    training_health,
)
from .reading import Columns, Run, flatten
from .statistics import final_and_best, kl_area, large_mu_events, mean_sd, total, variance

DEFAULT_WINDOW = 10  # the controller's default update_every


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
    Column("mu_events", "large μ changes %", 100, 1),
    Column("length_variance", "length variance"),
    Column("tokens", "tokens (thousands)", 1e-3, 0),
    Column("minutes", "minutes", 1, 1),
)
HEALTH = (
    Column("effective_tokens", "effective RL tokens (thousands)", 1e-3, 0),
    Column("clip_ratio", "clipped %", 100, 1),
    Column("kl_trigger", "KL trigger %", 100, 1),
    Column("kl_off_target", "KL off target %", 100, 1),
    Column("mean_length", "mean length", 1, 1),
    Column("within_bound", "updates within 0.1 %", 100, 1),
    Column("largest_update", "largest update"),
)
CONTROLLER = (
    Column("alpha_mean", "alpha"),
    Column("alpha_deviation", "deviation"),
    Column("alpha_low", "5%"),
    Column("alpha_high", "95%"),
    Column("alpha_large", "changes above 0.05 %", 100, 1),
    Column("kl_average_mean", "averaged KL"),
    Column("kl_average_deviation", "deviation"),
    Column("kl_average_low", "5%"),
    Column("kl_average_high", "95%"),
    Column("fast_before", "fast power of μ*"),
    Column("fast_after", "of μ"),
    Column("fast_removed", "removed %", 100, 1),
)
COVARIANCE = (
    Column("covariance", "c"),
    Column("covariance_variation", "deviation / mean"),
    Column("denominator_positive", "denominator > 0 %", 100, 1),
    Column("covariance_share", "|c| / (σs² + σr²) %", 100, 1),
    Column("gamma", "|gamma|"),
    Column("gamma_least", "least gamma"),
    Column("gamma_largest", "largest gamma"),
)
BY_STAGE = tuple(
    Column(f"{stage}_{term}", title, scale, 2 if scale == 1 else 0)
    for stage in STAGES
    for term, title, scale in (
        ("mu", f"{stage}: μ", 1),
        ("alpha", "weight of α %", 100),
        ("1", "of 1 %", 100),
        ("0", "of 0 %", 100),
    )
)


@dataclass(frozen=True)
class Table:
    """One block of results.

    cells[group][column] is (mean, sd over seeds) or, for a single run, (value, low, high), if the
    95% interval is known.
    """

    title: str
    columns: Sequence[Column]
    cells: Sequence[Sequence[tuple[float, ...]]]
    in_terminal: bool = True
    """Whether a terminal shows it too, not only the page."""


def window_of(runs: Sequence[Run]) -> int:
    """Steps of a controller interval: `update_every`, if the runs that have it agree."""
    leaves = (leaf for run in runs for leaf in flatten(run.config))
    values = {v for k, v in leaves if k.split(".")[-1] == "update_every" and isinstance(v, int)}
    return values.pop() if len(values) == 1 else DEFAULT_WINDOW


def summarize(run: Run, window: int) -> dict[str, float]:
    """Column key -> value for one run; nan if the run did not record the data for it.

    In addition to the column keys, `accuracy/<split>` is the final accuracy on each split and
    `start/<task>` the accuracy before training on each additional task.
    """
    metrics, steps = run.metrics, run.metrics["step"]
    # the evaluation before the first step is a baseline, not a result
    trained = run.evals["step"] > 0
    before, evals = ({k: v[rows] for k, v in run.evals.items()} for rows in (~trained, trained))
    final, best, _ = final_and_best(evals["step"], field(evals, "accuracy"))
    events, windows = large_mu_events(steps, field(metrics, "mu"), window)

    def last(rows: Columns, name: str) -> float:
        return final_and_best(rows["step"], field(rows, name))[0]

    by_name = {f"accuracy/{split}": last(evals, f"accuracy/{split}") for split in run.splits}
    by_name |= {f"start/{task}": last(before, f"accuracy/{task}") for task in run.tasks}
    return by_name | {
        **{f"start_{end}": last(before, end) for end in ("low", "high")},
        **{f"final_{end}": last(evals, end) for end in ("low", "high")},
        **({} if run.seed is None else {"seed": run.seed}),
        "prompts": last(evals, "prompts"),
        "start": last(before, "accuracy"),
        "final": final,
        "best": best,
        "kl_area": kl_area(steps, field(metrics, "kl")),
        "mu_events": events / windows if windows else math.nan,
        "length_variance": variance(field(metrics, "completions/mean_length")),
        "tokens": total(field(metrics, "tokens")),
        "minutes": total(field(metrics, "seconds")) / 60,
        **training_health(metrics, run.config),
        **alpha_stability(metrics),
        **smoothing(metrics),
        **cross_covariance(metrics),
        **stages(metrics),
    }


def tables(groups: Sequence[Group], window: int) -> list[Table]:
    """Tables for accuracy (overall and per split), additional tasks, and stability and cost.

    Columns without numbers are omitted.
    """
    summaries = [[summarize(run, window) for run in group.runs] for group in groups]
    splits = list(dict.fromkeys(split for group in groups for split in group.splits))
    tasks = list(dict.fromkeys(task for group in groups for task in group.tasks))
    # splits of additional tasks are only plotted
    main_splits = [s for s in splits if s.partition("/")[0] not in tasks]
    by_split = [Column(f"accuracy/{name}", f"final {name} %", 100, 1) for name in main_splits]
    prompts = {*filter(math.isfinite, (run["prompts"] for runs in summaries for run in runs))}
    number = f" ({prompts.pop():.0f} prompts)" if len(prompts) == 1 else ""
    by_task = [
        Column(f"{key}/{name}", f"{when} {name} %", 100, 1)
        for name in tasks
        for key, when in (("start", "start"), ("accuracy", "final"))
    ]
    blocks = (
        (f"Accuracy{number}", (*ACCURACY, *by_split), True),
        ("Additional tasks", by_task, True),
        ("Stability and cost", STABILITY, True),
        ("Training health", HEALTH, False),
        ("Controller", CONTROLLER, False),
        ("Stages of mu*", BY_STAGE, False),
        ("Covariance and bias", COVARIANCE, False),
    )
    result = []
    for title, columns, in_terminal in blocks:
        known = [
            column
            for column in columns
            if any(math.isfinite(run.get(column.key, math.nan)) for s in summaries for run in s)
        ]
        rows = [[cell(runs, column.key) for column in known] for runs in summaries]
        if known:
            result.append(Table(title, known, rows, in_terminal))
    return result


def cell(runs: Sequence[Mapping[str, float]], key: str) -> tuple[float, ...]:
    """The cell of a `Table` for the summaries of a group's runs."""
    ends = [runs[0].get(f"{key}_{end}", math.nan) for end in ("low", "high")]
    if len(runs) == 1 and math.isfinite(sum(ends)):
        return runs[0][key], *ends
    mean, sd = mean_sd([run.get(key, math.nan) for run in runs])
    seeds = {run.get("seed", i) for i, run in enumerate(runs)}
    return mean, sd if len(seeds) == len(runs) else math.nan  # a repeated seed has no spread


def write_cell(cell: tuple[float, ...], column: Column, unit: str = "") -> str:
    """`mean ± sd` or `value [low, high]` with equal decimals; a dash for nan."""
    mean, *spread = (value * column.scale for value in cell)
    if not math.isfinite(mean):
        return "–"
    decimals = column.decimals
    if decimals is None:
        decimals = min(6, max(0, 2 - math.floor(math.log10(abs(mean))))) if mean else 0
    text = f"{mean:,.{decimals}f}"
    if len(spread) == 2:
        return f"{text}{unit} [{spread[0]:.{decimals}f}, {spread[1]:.{decimals}f}]"
    return (f"{text} ± {spread[0]:,.{decimals}f}" if math.isfinite(spread[0]) else text) + unit


def progress(group: Group) -> str:
    """Number of steps done, and the planned number if any run of the group is unfinished."""
    done = {run.steps_done for run in group.runs}
    text = f"{min(done)} to {max(done)}" if len(done) > 1 else str(*done)
    unfinished = [r for r in group.runs if r.steps_planned and r.steps_done < r.steps_planned]
    return f"{text} of {unfinished[0].steps_planned}" if unfinished else text


def runs_table(runs: Sequence[Run]) -> str:
    """The results as aligned plain text for a terminal; the page has more tables."""
    groups = group_runs(runs)
    shown = [table for table in tables(groups, window_of(runs)) if table.in_terminal]
    texts = [_aligned(table, groups) for table in shown]
    return "\n\n".join([*texts, *filter(None, [caution(groups).strip()])])


def _aligned(table: Table, groups: Sequence[Group]) -> str:
    lines = [[table.title, "seeds", "steps", *(column.title for column in table.columns)]]
    for group, row in zip(groups, table.cells, strict=True):
        numbers = [write_cell(c, column) for c, column in zip(row, table.columns, strict=True)]
        lines.append([group.label, str(group.size), progress(group), *numbers])
    return align_columns(lines)
