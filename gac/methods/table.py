"""The methods as a table for the terminal."""

import textwrap

from gac.methods import METHODS, Method


def methods_table() -> str:
    """One line per method, by family: name, what it learns from, what it is, where it is from."""
    width = max(map(len, METHODS))
    families = dict.fromkeys(method.family for method in METHODS.values())
    lines = []
    for family in families:
        members = {name: m for name, m in METHODS.items() if m.family == family}
        lines.append(f"{family or 'other'}:")
        for name, method in members.items():
            words = f"{_summary(method)} [{_learns_from(method)}; {method.source}]"
            indent = " " * (width + 4)
            lines.append(
                textwrap.fill(
                    words, 100, initial_indent=f"  {name:{width}}  ", subsequent_indent=indent
                )
            )
    return "\n".join(lines)


def _summary(method: type[Method]) -> str:
    """The first paragraph of the class's own documentation."""
    return " ".join((method.__doc__ or "").split("\n\n")[0].split())


def _learns_from(method: type[Method]) -> str:
    sources = {"rollouts": method.uses_rollouts, "demonstrations": method.uses_demos}
    return " and ".join(name for name, used in sources.items() if used)
