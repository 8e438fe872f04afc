"""Formatting of numbers and tables, and the table of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def percent(value: float | None, sign: str = "") -> str:
    """Format a fraction as a percentage, or "-" for None. sign: "+" always shows the sign."""
    return "-" if value is None else f"{100 * value:{sign}.1f}"


def percent_interval(ends: Sequence[float] | None, sign: str = "") -> str:
    """Format an interval in percent, or "-" for None."""
    return "-" if ends is None else f"[{percent(ends[0], sign)}, {percent(ends[1], sign)}]"


def align_columns(lines: Sequence[Sequence[str]]) -> str:
    """Align rows of cells in columns: the first left-aligned, the others right-aligned.

    A rule separates the first row, the header.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = (
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )
    return "\n".join([head, "-" * max(map(len, [head, *body])), *body])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells may contain "|"."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


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
