"""Copies the results of a finished `make real` to the README: `python -m tools.real_page`.

It writes the table and its figure, docs/real.svg. The argument is the folder of the runs, by
default runs/real.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from gac.evaluation.table import markdown_table
from gac.report.answers import before_and_after
from gac.report.groups import group_runs
from gac.report.plots import COLORS, STYLE, save
from gac.report.reading import find_runs, read_run
from tools.pages import ROOT, fill


def results(runs: Path) -> dict[str, Any]:
    """What the report shows of the answers before and after training."""
    answers = before_and_after(group_runs(read_run(path) for path in find_runs([runs])))
    if answers is None:
        raise ValueError(f"{runs}: no run with two evaluations")
    return answers


def table(answers: dict[str, Any]) -> str:
    """Markdown table of the held-out accuracy before and after training, with 95% intervals."""
    rows = [
        [name, *(f"{mean} {interval}" for mean, interval in cells), answers["cut_off"][name]]
        for name, cells in answers["accuracy"]
    ]
    kinds = [f"{kind}s" for kind in answers["kinds"]]
    return markdown_table(["model", "all", *kinds, "answers cut off"], rows)


def draw(answers: dict[str, Any], file: Path) -> None:
    """Write the figure: a bar for each model and kind of prompt, with its 95% interval."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.0))
        axes = figure.subplots()
        models, kinds = answers["accuracy"], ["all", *(f"{k}s" for k in answers["kinds"])]
        width = 0.8 / len(models)
        for i, (name, cells) in enumerate(models):
            means = [float(mean.rstrip("%")) for mean, _ in cells]
            ends = [[float(x) for x in re.findall(r"[\d.]+", interval)] for _, interval in cells]
            low, high = zip(*ends, strict=True)
            places = [k + (i - (len(models) - 1) / 2) * width for k in range(len(kinds))]
            color = "#9a9a9a" if i == 0 else COLORS[i - 1]
            axes.bar(places, means, 0.9 * width, color=color, label=name)
            axes.vlines(places, low, high, color="#1b1b1b", linewidth=1.1)
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
        axes.set_title("SmolLM2-135M-Instruct: held-out accuracy")
        axes.legend(loc="upper right")
        save(figure, file)


def main() -> None:
    """Update the table in the README and its figure."""
    answers = results(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "real")
    draw(answers, ROOT / "docs" / "real.svg")
    fill(ROOT / "README.md", "real", table(answers))


if __name__ == "__main__":
    main()
