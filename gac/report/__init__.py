"""From run directories to one self-contained HTML page, PNG plots and a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from .groups import group_runs
from .reading import find_runs, read_run
from .table import context_of
from .table import results_table as _table_of

__all__ = ["find_runs", "results_table", "write_report"]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write `out/report.html` and `out/plots` about the given run directories; returns the page.

    A directory without metrics.jsonl stands for the runs below it. Runs may be unfinished. Raises
    FileNotFoundError where there is no run, ConfigError for a config.yaml that is not YAML.
    """
    from .page import render
    from .plots import draw_plots

    loaded = [read_run(path) for path in find_runs(runs)]
    groups = group_runs(loaded)
    plots = draw_plots(groups, out / "plots")
    page = out / "report.html"
    partial = page.with_suffix(".partial")
    partial.write_text(render(groups, context_of(loaded), plots), encoding="utf-8")
    return partial.replace(page)


def results_table(runs: Sequence[Path]) -> str:
    """The report's table as aligned plain text; takes and raises the same as `write_report`."""
    return _table_of([read_run(path) for path in find_runs(runs)])
