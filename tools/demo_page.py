"""Copies the plot and the table of a finished demo: `python -m tools.demo_page [RUNS]`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from gac.demo import DEMO_METHODS
from gac.evaluation.table import markdown_table
from tools.pages import ROOT, fill


def table(runs: Path) -> str:
    """Markdown table of the last evaluation of each default method, seed 0."""
    head = "method | greedy accuracy | on `+` | on `-` | steps"
    rows = []
    for method in DEMO_METHODS:
        text = (runs / f"{method}-0" / "eval.jsonl").read_text()
        last = json.loads(text.splitlines()[-1])
        cells = [last["accuracy"], last["accuracy/+"], last["accuracy/-"]]
        rows.append([method, *(f"{100 * x:.1f}%" for x in cells), str(last["step"])])
    return markdown_table(head.split(" | "), rows)


def main() -> None:
    """Update docs/demo.svg and the table in the README."""
    runs = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "demo"
    shutil.copyfile(runs / "plots" / "accuracy.svg", ROOT / "docs" / "demo.svg")
    fill(ROOT / "README.md", "demo", table(runs))


if __name__ == "__main__":
    main()
