"""Generates docs/methods.md from the method classes: `python -m tools.methods_table`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gac.config import to_yaml
from gac.evaluation.table import markdown_table
from gac.methods import METHODS
from gac.methods.listing import describe_needs, families, summary
from tools.ablations import ABLATIONS

DOCS = Path("docs")
PAGE, RESULTS = DOCS / "methods.md", DOCS / "methods_study.json"
INTRODUCTION = """\
# Methods

<!-- written by python -m tools.methods_table; do not edit -->

All methods for combining SFT and RL in `gac train`. Select one by name and set its keys,
e.g. `gac train run.yaml --set method=cagrad method.radius=0.8`; `gac methods NAME` explains them.
All methods share the trainer, the data, the loss kernels and the evaluation. Each is a small class
in `gac/methods/`, whose docstring lists the choices that the publication leaves open. The
[study](study.md) says why LSPO, SRPO and SASR are absent.

**Needs** lists what the trainer must provide: `demonstrations` are a separate dataset;
`demonstrations of the sampled prompts` come from the prompts' rows (`data.demo_field`). **Extra**
is the work per step beyond one forward pass over all rows and one backward pass over the rows that
are trained on.
"""
VARIANTS = """\
## Ablations of gac

These settings of `gac` are not methods of their own; `tools/ablations.py` has them, and the classes
that they name. The results are from the same runs as those above.
"""
STUDY = """\
Greedy accuracy in percent on the demo task's 200 held-out problems after {steps} steps, mean and
standard deviation over {seeds} seeds, written by `python -m tools.methods_study`. `+` can be
learned from rewards only, `-` needs demonstrations; the demonstrations are weak (a borrow is
forgotten with probability 0.3). Methods marked *same* had such a demonstration for every
subtraction among the prompts, the others 256 separate ones, so the two groups saw different data.
All methods use one learning rate, and nothing was tuned. With 100 problems of each kind and a
single base model, differences of a few points are not meaningful. Schedules are scaled to the
length of the run (`gac/demo/run.py`).
"""
MEASURES = ("all", "+", "-", "training time (s)")
DEMOS = {"prompt": "same", "separate": "separate", "none": "none"}


def main() -> int:
    """Write docs/methods.md below the current directory."""
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
    print(f"wrote {PAGE}")
    return 0


def page(study: dict[str, Any]) -> str:
    """Render docs/methods.md; `study` is the output of `python -m tools.methods_study`."""
    rows = []
    for family, members in families(METHODS).items():
        rows.append((f"**{family.capitalize()}**", "", "", "", ""))
        rows += [
            (f"`{name}`", summary(m), m.source, ", ".join(describe_needs(m())), m.cost)
            for name, m in members.items()
        ]
    head: tuple[str, ...] = ("name", "what it does", "source", "needs", "extra")
    parts = [f"{INTRODUCTION}\n{markdown_table(head, rows)}\n"]
    setting, measured = study["setting"], {row["name"]: _cells(row) for row in study["rows"]}
    text = STUDY.format(steps=setting["steps"], seeds=setting["seeds"])
    results = [(f"`{name}`", *row) for name, row in measured.items() if name not in ABLATIONS]
    missing = [f"`{name}`" for name in METHODS if name not in measured]
    note = f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    head = ("method", "demonstrations", *MEASURES)
    parts.append(f"## On the demo task\n\n{text}\n{markdown_table(head, results)}\n{note}")
    settings = [
        (f"`{label}`", f"`{to_yaml(fields, inline=True)}`", *measured[label][1:])
        for label, fields in ABLATIONS.items()
        if label in measured
    ]
    head = ("label", "fields of `gac`", *MEASURES)
    parts.append(f"{VARIANTS}\n{markdown_table(head, settings)}\n")
    return "\n".join(parts)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The demonstrations and MEASURES of a row of the study."""
    shares = [f"{100 * row[key][0]:.1f} ± {100 * row[key][1]:.1f}" for key in ("accuracy", *"+-")]
    seconds = "not measured" if row["seconds"] is None else f"{row['seconds'][0]:.0f}"
    return DEMOS[row["demos"]], *shares, seconds


if __name__ == "__main__":
    sys.exit(main())
