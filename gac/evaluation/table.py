"""Results as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gac.evaluation.cells import align_columns, percent, percent_interval

HEAD = ("task", "accuracy", "95% interval", "pass@k", "prompts x samples", "truncated", "dropped")


def results_table(results: Mapping[str, Any]) -> str:
    """One line per task and split, in percent; a comparison adds a column of differences."""
    return align_columns(results_lines(results))


def results_lines(results: Mapping[str, Any]) -> list[list[str]]:
    """The table's cells, header first. Split rows are indented by two spaces."""
    compared = any("against" in row for row in results["tasks"].values())
    lines = [[*HEAD, "difference"] if compared else list(HEAD)]
    for name, row in results["tasks"].items():
        lines.append([*_cells(name, row), *([_difference(row)] if compared else [])])
        for split, part in row["splits"].items():
            cells = [f"  {split}", percent(part["accuracy"]), percent_interval(part["ci95"]), ""]
            lines.append([*cells, str(part["prompts"]), *[""] * (len(lines[0]) - 5)])
    return lines


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    passed = "  ".join(f"@{k} {percent(value)}" for k, value in row["pass_at"].items())
    size = f"{row['prompts']} x {row['samples']}"
    truncated, dropped = percent(row["truncated"]), str(row["dropped"])
    return [
        name,
        percent(row["accuracy"]),
        percent_interval(row["ci95"]),
        passed or "-",
        size,
        truncated,
        dropped,
    ]


def _difference(row: Mapping[str, Any]) -> str:
    paired = row.get("against")
    if not paired or paired["difference"] is None:
        return "-"
    gap, ends = percent(paired["difference"], "+"), percent_interval(paired["ci95"], "+")
    return f"{gap} {ends}, {paired['prompts']} shared"
