"""Writes generated tables into Markdown pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"


def fill(page: Path, block: str, text: str) -> None:
    """Replace the lines of `page` between `<!-- block -->` and `<!-- /block -->` with `text`."""
    start, end = f"<!-- {block} -->\n", f"<!-- /{block} -->"
    before, _, rest = page.read_text().partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page}: needs the lines {start.strip()} and {end}")
    page.write_text(f"{before}{start}{text.strip()}\n{end}{after}")
