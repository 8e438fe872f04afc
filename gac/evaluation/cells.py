"""Formatting of numbers and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


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
