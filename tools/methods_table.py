"""Generates docs/methods.md from the method classes: `python -m tools.methods_table`."""

from __future__ import annotations

import sys
from pathlib import Path

from gac.evaluation.table import markdown_table
from gac.methods import METHODS
from gac.methods.listing import describe_needs, families, summary

PAGE = Path("docs") / "methods.md"
INTRODUCTION = """\
# Methods

<!-- written by python -m tools.methods_table; do not edit -->

All methods for combining SFT and RL in `gac train`. Select one by name and set its keys,
e.g. `gac train run.yaml --set method=cagrad method.radius=0.8`; `gac methods NAME` explains them.
All methods share the trainer, the data, the loss kernels and the evaluation. Each is a small class
in `gac/methods/`, whose docstring lists the choices that the publication leaves open. Which one to
use: [Choose mu](choose_mu.md). A [study](../research/methods.md) has the accuracy of
most of them on one small task, without tuning; `moco` with its default keys collapses there (2.3%).

**Needs** lists what the trainer must provide: `demonstrations` are a separate dataset;
`demonstrations of the sampled prompts` come from the prompts' rows (`data.demo_field`). **Extra**
is the work per step beyond one forward pass over all rows and one backward pass over the rows that
are trained on.
"""


def main() -> int:
    """Write docs/methods.md below the current directory."""
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
    return 0


def page() -> str:
    """Render docs/methods.md."""
    rows = []
    for family, members in families(METHODS).items():
        rows.append((f"**{family.capitalize()}**", "", "", "", ""))
        rows += [
            (f"`{name}`", summary(m), m.source, ", ".join(describe_needs(m())), m.cost)
            for name, m in members.items()
        ]
    head = ("name", "what it does", "source", "needs", "extra")
    return f"{INTRODUCTION}\n{markdown_table(head, rows)}\n"


if __name__ == "__main__":
    sys.exit(main())
