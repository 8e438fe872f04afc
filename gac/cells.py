"""Numbers as cells of a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def percent(value: float | None, sign: str = "") -> str:
    """A share in percent; a dash for none. sign: "+" writes it always."""
    return "-" if value is None else f"{100 * value:{sign}.1f}"


def span(ends: Sequence[float] | None, sign: str = "") -> str:
    """An interval in percent; a dash for none."""
    return "-" if ends is None else f"[{percent(ends[0], sign)}, {percent(ends[1], sign)}]"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Rows of cells as columns, the first flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )
