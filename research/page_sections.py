"""Sections of Markdown pages that a program of this folder writes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

END = "\n<!-- end -->"


def update_pages(
    program: str,
    description: str | None,
    pages: Sequence[Path],
    sections: Mapping[str, str],
    argv: Sequence[str] | None,
) -> int:
    """Write `sections` into `pages` or, with `--check` in `argv`, compare them.

    A section stands between `<!-- begin: python -m PROGRAM NAME -->` and `<!-- end -->`.

    Args:
        program: the module that computes the sections.
        sections: name -> text.

    Returns:
        The exit code: 1 if `--check` found a page that is out of date.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    options = parser.parse_args(argv)
    changed = []
    for path in pages:
        before = page = path.read_text()
        for name, text in sections.items():
            _, begin, rest = page.partition(f"<!-- begin: python -m {program} {name} -->\n\n")
            if begin:
                page = page.removesuffix(rest) + text + rest[rest.index(END) :]
        if page != before:
            changed.append(path)
            if not options.check:
                path.write_text(page)
    if options.check and changed:
        print(f"{changed[0]} is out of date: run python -m {program}")
    return int(options.check and bool(changed))
