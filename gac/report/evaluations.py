"""`gac eval` results in the report: a table of tasks and a figure of their intervals."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gac.errors import ConfigError
from gac.evaluation.table import results_lines, results_table

RESULTS, SAMPLES = "results.json", "samples.jsonl.gz"


@dataclass(frozen=True)
class Evaluation:
    """The contents of one results.json."""

    path: Path
    """Its folder."""
    results: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The model paths in the settings of the tasks, separated by commas."""
        tasks = self.results["tasks"].values()
        return ", ".join(dict.fromkeys(str(row["setting"]["model"]["path"]) for row in tasks))

    @property
    def baselines(self) -> str:
        """Comma-separated paths of the results with which the tasks were compared."""
        tasks = self.results["tasks"].values()
        paths = (row["against"]["results"] for row in tasks if "against" in row)
        return ", ".join(dict.fromkeys(paths))


def find_evaluations(paths: Iterable[Path]) -> list[Evaluation]:
    """Find results at or below the given paths. Raises ConfigError for invalid results."""
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        candidates = (file.parent for file in path.rglob(RESULTS))
        # other tools may also use that file name
        folders |= dict.fromkeys(sorted(f for f in candidates if (f / SAMPLES).is_file()))
    return [_read(folder) for folder in folders]


def evaluations_table(evaluations: Sequence[Evaluation]) -> str:
    """The tables as aligned plain text, each below its folder's path."""
    return "\n\n".join(f"{e.path}\n{results_table(e.results)}" for e in evaluations)


def sections(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return the values that the report template needs, one dict per evaluation."""
    result = []
    for evaluation in evaluations:
        columns, *lines = results_lines(evaluation.results)
        names = [line[0].strip() for line in lines]  # a split is indented below its task
        result.append(
            {
                "path": str(evaluation.path),
                "model": evaluation.model,
                "baselines": evaluation.baselines,
                "columns": columns,
                "rows": [(n, n != line[0], line[1:]) for n, line in zip(names, lines, strict=True)],
            }
        )
    return result


def draw(evaluations: Sequence[Evaluation]) -> str:
    """Draw each task's accuracy with its interval, one color per folder; returns its URL."""
    from .plots import COLORS, MARKERS

    tasks = list(dict.fromkeys(name for e in evaluations for name in e.results["tasks"]))
    height = 0.3 * len(tasks) * max(len(evaluations), 2) / 2 + 0.35 * len(evaluations) + 0.9

    def points(axes: Any) -> None:
        for number, evaluation in enumerate(evaluations):
            shift = 0.6 * ((number + 0.5) / len(evaluations) - 0.5)  # side by side within a task
            color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
            axes.plot([], [], marker, label=str(evaluation.path), color=color)
            for name, row in evaluation.results["tasks"].items():
                y = -tasks.index(name) - shift
                draw_interval(axes, y, row["accuracy"], row["ci95"], color, marker)
        axes.set_ylim(-len(tasks) + 0.5, 0.5)
        axes.set_xlim(min(0, axes.dataLim.x0) - 1, max(100, axes.dataLim.x1) + 1)
        if len(evaluations) > 1:
            axes.figure.legend(loc="outside lower center")

    return interval_figure(tasks, height, "accuracy, %", points)


def interval_figure(
    labels: Sequence[str], height: float, axis: str, draw: Callable[[Any], None]
) -> str:
    """The URL of a figure with one row per label; `draw(axes)` plots percentages in the rows.

    height: of the figure, in inches.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from .plots import STYLE, embedded, save

    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, height))
        axes = figure.subplots()
        draw(axes)
        low, high = axes.get_xlim()
        if high - low < 1:  # nearly equal values: do not magnify differences
            axes.set_xlim(
                max(low - 1, -0.2) if low >= -0.2 else low - 1,
                min(high + 1, 100.2) if high <= 100.2 else high + 1,
            )
        axes.set_yticks([-i for i in range(len(labels))], labels)
        axes.grid(visible=True)
        axes.set_xlabel(axis)
        buffer = io.BytesIO()
        save(figure, buffer)
    return embedded(buffer.getvalue())


def draw_interval(
    axes: Any,
    y: float,
    mean: float | None,
    interval: Sequence[float] | None,
    color: str,
    marker: str = "o",
) -> None:
    """Draw a fraction and its interval at height `y`; unknown values are skipped."""
    if mean is not None:
        axes.plot([100 * mean], [y], marker, color=color)
    if interval is not None:
        axes.plot([100 * end for end in interval], [y] * 2, linewidth=2, color=color)


def _read(folder: Path) -> Evaluation:
    path = folder / RESULTS
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        evaluation = Evaluation(folder, results)
        results_lines(results), evaluation.model, evaluation.baselines
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a valid `gac eval` result ({error!r}): move it away or rerun the "
            "evaluation"
        ) from error
    return evaluation
