"""study.html: a single file with the table, a figure of the intervals and the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gac.config import to_yaml
from gac.report.evaluations import draw_interval, interval_figure
from gac.report.page import render_template
from gac.report.plots import COLORS
from gac.study.results import row_cells

COLUMNS = ("seeds", "accuracy", "95% interval", "against the baseline", "95% interval", "p", "d")
HOW_TO_READ = (
    "Accuracy is the fraction of held-out problems solved after the last step (at the best "
    "evaluation, for methods that keep their best weights). Intervals are 95% t intervals over the "
    "seeds; without any effect, one in 20 differences has an interval that excludes 0. Differences "
    "are paired by seed, because runs with the same seed share data order and initial model. p is "
    "that of the paired t test, d is Cohen's d: the difference in pooled standard deviations."
)


def render(study: Mapping[str, Any], report: str | None) -> str:
    """Render the page. report: file in the same folder with the curves of the runs, or None."""
    setting, rows = study["setting"], study["methods"]
    best = max((row["mean"] for row in rows.values() if row["mean"] is not None), default=math.inf)
    return render_template(
        "study.html.j2",
        title=f"Study: {setting['config']}",
        headline=headline(study),
        columns=["method", *COLUMNS],
        rows=[(label, row_cells(row), row["mean"] == best) for label, row in rows.items()],
        baseline=setting["baseline"],
        how_to_read=HOW_TO_READ,
        figure=draw(rows, setting["baseline"]),
        report=report,
        notes=study["notes"],
        failed=study["failed"],
        setting=to_yaml(dict(setting)),
    )


def headline(study: Mapping[str, Any]) -> str:
    """List the methods whose difference from the baseline has an interval that excludes 0."""
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


def draw(rows: Mapping[str, Any], baseline: str) -> str:
    """For each method, draw a dot per seed and a bar that shows the mean and its interval."""

    def points(axes: Any) -> None:
        for y, (label, row) in enumerate(rows.items()):
            color = COLORS[1] if label == baseline else COLORS[0]
            known = [100 * value for value in row["final"] if value is not None]
            axes.plot(known, [-y] * len(known), ".", color=color, alpha=0.3, markersize=7)
            draw_interval(axes, -y, row["mean"], row["ci95"], color)

    label = "final accuracy on held-out problems, %"
    return interval_figure(list(rows), 0.34 * len(rows) + 1.1, label, points)
