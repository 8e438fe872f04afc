"""The methods as tables: `gac methods`, and docs/methods.md by `python -m gac.methods.table`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gac.methods import METHODS, Method
from gac.methods.base import Stage

DOCS = Path("docs")
PAGE, RESULTS = DOCS / "methods.md", DOCS / "methods_study.json"
DEMOS = {
    "none": (),
    "apart": ("demonstrations",),
    "prompt": ("demonstrations of the sampled prompts",),
}
COMPLETIONS = 8  # rollouts per prompt in the examples that are looked at here
INTRODUCTION = """\
# Methods

Written by `python -m gac.methods.table`; do not edit. A method is one frozen dataclass in
`gac/methods/`; its fields are configuration keys (`gac methods NAME` explains them), e.g.
`gac train run.yaml --set method=cagrad method.radius=0.8`. All methods share the trainer, the data,
the loss kernels and the evaluation; formulas, choices and where the publications leave them open
are in each class's own documentation.

**Needs** is what the trainer provides: `demonstrations` are a set of their own, `demonstrations of
the sampled prompts` come from the prompts' rows (`data.demo_field`). **Extra** is work per step
beyond one forward of every row and one backward of those that learn.
"""


def main() -> int:
    """Write docs/methods.md below the current directory."""
    PAGE.write_text(page(json.loads(RESULTS.read_text()) if RESULTS.exists() else None))
    print(f"wrote {PAGE}")
    return 0


def methods_table() -> str:
    """By family, each method: name, what it is, source, what it needs, extra cost per step."""
    width = max(map(len, METHODS))
    lines = []
    for family, members in families().items():
        lines.append(f"{family}:")
        for method in members:
            words = f"{summary(method)} [{method.source}] Needs: {', '.join(needs(method()))}."
            if method.cost != "none":
                words += f" Extra: {method.cost}."
            indent = " " * (width + 4)
            lines.append(
                textwrap.fill(
                    words, 100, initial_indent=f"  {method.name:{width}}  ",
                    subsequent_indent=indent,
                )
            )  # fmt: skip
    return "\n".join(lines)


def page(study: dict[str, Any] | None) -> str:
    """docs/methods.md; `study` is what `python -m gac.study` wrote."""
    parts = [INTRODUCTION]
    for family, members in families().items():
        rows = [
            (f"`{m.name}`", summary(m), m.source, ", ".join(needs(m())), m.cost) for m in members
        ]
        head = ("name", "what it does", "source", "needs", "extra")
        parts.append(f"## {family.capitalize()}\n\n{_markdown(head, rows)}\n")
    if study:
        parts.append(_study(study))
    return "\n".join(parts)


def _study(study: dict[str, Any]) -> str:
    setting = study["setting"]
    words = (
        f"Greedy accuracy in percent on the demo task's 200 held-out problems after "
        f"{setting['steps']} steps, mean and standard deviation over {setting['seeds']} seeds, "
        "written by `python -m gac.study`. `+` can be found by rewards, `-` must be shown; the "
        "demonstrations are weak (a borrow is forgotten at 0.3). Methods marked *same* got such a "
        "demonstration on every subtraction among the prompts, the others 256 apart from them, so "
        "the two groups saw different data. One learning rate for all, nothing was tuned; the "
        "problems are 100 of each kind and the base model is one, so differences of a few points "
        "mean nothing. Schedules are scaled to the run's length (`gac/demo/settings.py`)."
    )
    rows = []
    for row in study["rows"]:
        cells = [
            f"{100 * row[key][0]:.1f} ± {100 * row[key][1]:.1f}" for key in ("accuracy", *"+-")
        ]
        data = {"prompt": "same", "apart": "apart", "none": "none"}[row["demos"]]
        rows.append((f"`{row['name']}`", data, *cells, f"{row['seconds'][0]:.0f}"))
    head = ("method", "demonstrations", "all", "+", "-", "seconds of training")
    return f"## On the demo task\n\n{textwrap.fill(words, 100)}\n\n{_markdown(head, rows)}\n"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def families() -> dict[str, list[type[Method]]]:
    """Family -> its methods, in the order of the table of methods."""
    found: dict[str, list[type[Method]]] = {}
    for method in METHODS.values():
        found.setdefault(method.family, []).append(method)
    return found


def summary(method: type[Method]) -> str:
    """The first paragraph of the class's own documentation."""
    return " ".join((method.__doc__ or "").split("\n\n")[0].split())


def needs(method: Method) -> tuple[str, ...]:
    """What the trainer has to provide, read off the method's own declarations."""
    stages: Sequence[Stage] = method.stages(COMPLETIONS) if method.uses_rollouts else ()
    sampled = "rollouts of the reference" if method.samples_reference else "rollouts"
    declared = {
        sampled: method.uses_rollouts,
        **dict.fromkeys(DEMOS[method.demos], True),
        "prefixes": any(stage.prefix for stage in stages),
        "separate gradients": any(method.parts(step) for step in range(20)),
        "reference": method.uses_reference,
        "log-probs": method.own_loss,
        "losses after the update": method.looks_back,
        "best weights": method.keeps_best,
    }
    return tuple(name for name, needed in declared.items() if needed)


if __name__ == "__main__":
    sys.exit(main())
