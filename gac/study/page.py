"""study.html: a single file with the table, a figure of the intervals and the settings."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from gac.config import to_yaml
from gac.evaluation.cells import percent, percent_interval
from gac.report.page import render_template
from gac.report.plots import COLORS, DPI, STYLE

COLUMNS = ("seeds", "accuracy", "95 % interval", "against the baseline", "95 % interval")
HOW_TO_READ = (
    "Accuracy is the fraction of held-out problems solved after the last step (at the best "
    "evaluation, for methods that keep their best weights). Intervals contain 95 % of the means "
    "over resampled seeds (percentile bootstrap); with few seeds they are somewhat too narrow. "
    "Differences are paired by seed, because runs with the same seed share data order and initial "
    "model."
)


def render(study: Mapping[str, Any], report: str | None) -> str:
    """Render the page. report: file in the same folder with the curves of the runs, or None."""
    setting, rows = study["setting"], study["methods"]
    best = max((row["mean"] for row in rows.values() if row["mean"] is not None), default=None)
    return render_template(
        "study.html.j2",
        title=f"Study: {setting['config']}",
        headline=headline(study),
        columns=["method", *COLUMNS],
        rows=[(label, *_cells(row, best)) for label, row in rows.items()],
        baseline=setting["baseline"],
        how_to_read=HOW_TO_READ,
        figure=base64.b64encode(draw(rows, setting["baseline"])).decode("ascii"),
        report=report,
        failed=study["failed"],
        setting=to_yaml(dict(setting)),
    )


def headline(study: Mapping[str, Any]) -> str:
    """A sentence on the methods whose difference from the baseline has an interval without 0."""
    baseline = study["setting"]["baseline"]
    groups: dict[str, list[str]] = {"ahead of": [], "behind": []}  # labels by direction
    for label, row in study["methods"].items():
        ci95 = row["against_baseline"]["ci95"]
        if label == baseline or ci95 is None:
            continue
        if ci95[0] > 0 or ci95[1] < 0:
            groups["ahead of" if ci95[0] > 0 else "behind"].append(label)
    parts = [f"{side} {baseline}: {', '.join(labels)}" for side, labels in groups.items() if labels]
    if not parts:
        return f"No method differs from {baseline} with an interval that excludes 0."
    return f"Differences whose interval excludes 0: {'; '.join(parts)}."


def _cells(row: Mapping[str, Any], best: float | None) -> tuple[list[str], bool]:
    """The table cells of a method, and whether its mean is the highest."""
    against = row["against_baseline"]
    known = sum(value is not None for value in row["final"])
    cells = [
        str(known),
        percent(row["mean"]),
        percent_interval(row["ci95"]),
        percent(against["difference"], "+"),
        percent_interval(against["ci95"], "+"),
    ]
    return cells, row["mean"] is not None and row["mean"] == best


def draw(rows: Mapping[str, Any], baseline: str) -> bytes:
    """Draw a PNG: for each method, a dot per seed, and the mean with its interval as a bar."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.34 * len(rows) + 1.1), dpi=DPI, layout="constrained")
        axes = figure.subplots()
        for y, (label, row) in enumerate(rows.items()):
            _draw_row(axes, -y, row, COLORS[1] if label == baseline else COLORS[0])
        axes.set_yticks([-i for i in range(len(rows))], list(rows))
        axes.grid(visible=True, axis="x")
        axes.set_xlabel("final accuracy on held-out problems, %")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_row(axes: Any, y: int, row: Mapping[str, Any], color: str) -> None:
    known: Sequence[float] = [100 * value for value in row["final"] if value is not None]
    axes.plot(known, [y] * len(known), ".", color=color, alpha=0.3, markersize=7)
    if row["mean"] is None:
        return
    axes.plot([100 * row["mean"]], [y], "o", color=color, markersize=6)
    if row["ci95"] is not None:
        axes.plot([100 * end for end in row["ci95"]], [y] * 2, color=color, linewidth=2.4)
