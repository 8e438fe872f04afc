"""Copies the results of a finished `make real` to the README: `python -m tools.real_page`.

The argument is the folder of the runs, by default runs/real.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gac.evaluation.table import markdown_table
from gac.report.answers import before_and_after
from gac.report.groups import group_runs
from gac.report.reading import find_runs, read_run
from tools.pages import ROOT, fill


def table(runs: Path) -> str:
    """Markdown table of the held-out accuracy before and after training, with 95% intervals."""
    answers = before_and_after(group_runs(read_run(path) for path in find_runs([runs])))
    if answers is None:
        raise ValueError(f"{runs}: no run with two evaluations")
    rows = [
        [name, *(f"{mean} {interval}" for mean, interval in cells), answers["cut_off"][name]]
        for name, cells in answers["accuracy"]
    ]
    kinds = [f"{kind}s" for kind in answers["kinds"]]
    return markdown_table(["model", "all", *kinds, "answers cut off"], rows)


def main() -> None:
    """Update the table in the README."""
    runs = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "real"
    fill(ROOT / "README.md", "real", table(runs))


if __name__ == "__main__":
    main()
