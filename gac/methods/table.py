"""The methods as tables: for the terminal, and for docs/methods.md."""

from __future__ import annotations

import textwrap

from gac.methods import METHODS, Method

DEMOS = {
    "none": (),
    "apart": ("demonstrations",),
    "prompt": ("demonstrations of the sampled prompts",),
}
EXAMPLE_COMPLETIONS = 8


def methods_table() -> str:
    """By family, each method: name, what it is, source, what it needs, extra cost per step."""
    width = max(map(len, METHODS))
    lines = []
    for family in families():
        lines.append(f"{family}:")
        for name, method in METHODS.items():
            if method.family != family:
                continue
            words = f"{summary(method)} [{method.source}] Needs: {', '.join(needs(method()))}."
            if method.cost != "none":
                words += f" Extra: {method.cost}."
            indent = " " * (width + 4)
            lines.append(
                textwrap.fill(
                    words, 100, initial_indent=f"  {name:{width}}  ", subsequent_indent=indent
                )
            )
    return "\n".join(lines)


def families() -> list[str]:
    """The families in the order of the table."""
    return list(dict.fromkeys(method.family for method in METHODS.values()))


def summary(method: type[Method]) -> str:
    """The first paragraph of the class's own documentation."""
    return " ".join((method.__doc__ or "").split("\n\n")[0].split())


def needs(method: Method) -> tuple[str, ...]:
    """What the trainer has to provide, read off the method's own declarations."""
    found: list[str] = []
    if method.uses_rollouts:
        found.append("rollouts of the reference" if method.samples_reference else "rollouts")
    found += DEMOS[method.demos]
    has_prefix = method.uses_rollouts and any(s.prefix for s in _stages(method))
    steps = range(20)
    further = {
        "prefixes": has_prefix,
        "separate gradients": any(method.parts(step) for step in steps),
        "reference": method.uses_reference,
        "log-probs": method.own_loss,
        "losses after the update": method.looks_back,
        "best weights": method.keeps_best,
    }
    return (*found, *(name for name, needed in further.items() if needed))


def _stages(method: Method):
    return method.stages(EXAMPLE_COMPLETIONS)
