"""Results as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("task", "accuracy", "95 % interval", "pass@k", "prompts x samples", "cut off", "dropped")


def results_table(results: Mapping[str, Any]) -> str:
    """One line per task and per split of it, in percent; a last column where it was compared."""
    compared = any("against" in row for row in results["tasks"].values())
    lines = [[*HEAD, "against"] if compared else list(HEAD)]
    for name, row in results["tasks"].items():
        lines.append([*_cells(name, row), *([_against(row)] if compared else [])])
        for split, part in row["splits"].items():
            cells = [f"  {split}", _percent(part["accuracy"]), _interval(part["ci95"]), ""]
            lines.append([*cells, str(part["prompts"]), *[""] * (len(lines[0]) - 5)])
    return _aligned(lines)


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    passed = "  ".join(f"@{k} {_percent(value)}" for k, value in row["pass_at"].items())
    size = f"{row['prompts']} x {row['samples']}"
    cut, dropped = _percent(row["truncated"]), str(row["dropped"])
    return [
        name, _percent(row["accuracy"]), _interval(row["ci95"]), passed or "-", size, cut, dropped,
    ]  # fmt: skip


def _against(row: Mapping[str, Any]) -> str:
    found = row.get("against")
    if not found or found["difference"] is None:
        return "-"
    gap = f"{100 * found['difference']:+.1f}"
    return f"{gap} {_interval(found['ci95'])}, {found['prompts']} shared"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _interval(ends: Sequence[float] | None) -> str:
    return "-" if ends is None else f"[{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
