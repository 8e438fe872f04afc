"""Reports: HTML pages, plots and tables of runs and evaluations."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from gac.config import save_text

from .evaluations import Evaluation, evaluations_table, find_evaluations
from .groups import group_runs
from .reading import find_runs, read_run
from .table import runs_table, window_of

__all__ = ["find_folders", "find_runs", "results_table", "write_report"]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write `out/report.html` and `out/plots` for finished or unfinished runs.

    Args:
        runs: run directories, or folders that contain runs or `gac eval` results.
        out: the output folder.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: a folder contains no runs or results.
        ConfigError: a config.yaml is not valid YAML.
    """
    from .page import render, render_evaluations
    from .plots import draw_plots

    run_folders, evaluations = _find(runs)
    page = out / "report.html"
    if run_folders:
        loaded = [read_run(path) for path in run_folders]
        groups = group_runs(loaded)
        plots = draw_plots(groups, out / "plots")
        text = render(groups, window_of(loaded), plots, evaluations)
    else:
        text = render_evaluations(evaluations)
    save_text(page, text)
    return page


def results_table(runs: Sequence[Path]) -> str:
    """The report's tables as aligned plain text.

    Takes the same `runs` and raises the same errors as `write_report`.
    """
    run_folders, evaluations = _find(runs)
    texts = []
    if run_folders:
        texts.append(runs_table([read_run(path) for path in run_folders]))
    if evaluations:
        texts.append(evaluations_table(evaluations))
    return "\n\n".join(texts)


def find_folders(paths: Sequence[Path]) -> list[Path]:
    """Find run directories and result folders at or below `paths`; raises like `find_runs`."""
    runs, evaluations = _find(paths)
    return list(dict.fromkeys([*runs, *(evaluation.path for evaluation in evaluations)]))


def _find(paths: Sequence[Path]) -> tuple[list[Path], list[Evaluation]]:
    """Find runs and evaluations at or below each path, which must contain at least one."""
    runs: list[Path] = []
    evaluations: list[Evaluation] = []
    for path in paths:
        results = find_evaluations([path])
        with contextlib.suppress(FileNotFoundError) if results else contextlib.nullcontext():
            runs += find_runs([path])
        evaluations += results
    by_path = {evaluation.path.resolve(): evaluation for evaluation in evaluations}
    return list({run.resolve(): run for run in runs}.values()), list(by_path.values())
