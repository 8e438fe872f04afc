"""The methods as a table for the terminal."""

import textwrap

from gac.methods import METHODS

WIDTH = 100


def methods_table() -> str:
    """Every method by family: its name, the first paragraph of its documentation, its source."""
    column = max(map(len, METHODS)) + 4
    lines = []
    for family in dict.fromkeys(method.family for method in METHODS.values()):
        lines.append(f"{family}:")
        for name, method in METHODS.items():
            if method.family == family:
                summary = " ".join((method.__doc__ or "").split("\n\n")[0].split())
                lines.append(
                    textwrap.fill(
                        f"{summary} [{method.source}]",
                        WIDTH,
                        initial_indent=f"  {name}".ljust(column),
                        subsequent_indent=" " * column,
                    )
                )
    return "\n".join(lines)
