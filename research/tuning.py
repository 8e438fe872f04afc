"""Tunes the baselines on a validation set with the grids of the paper's table 18.

Usage: `python -m research.tuning run.yaml --validation rows.jsonl --test other.jsonl`. Every
candidate is trained with the keys of run.yaml and every seed, and evaluated on the validation rows;
the best mean is chosen, trained again with other seeds, and evaluated on the test rows. All
candidates are reported, in tuning.json of the configuration's `out` and on the terminal. Finished
runs are kept, so the command can be interrupted and rerun. A budget of tokens that is the same for
all, as in the paper, is the key `budget_tokens`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gac.errors import ConfigError
from gac.evaluation.table import markdown_table, percent
from gac.imports import find_user_code
from gac.study.command import Arm, arm_config, read_study
from gac.study.runs import result, run_all
from gac.train_config import TrainConfig
from tools.origin import origin

GRIDS: dict[str, dict[str, Sequence[Any]]] = {
    "nash-mtl": {"scale": (0.5, 1.0, 2.0)},
    "cagrad": {"radius": (0.2, 0.5, 0.8)},
    "pcgrad": {"threshold": (-0.2, 0.0, 0.2)},
    "mgda": {},
    "dwa": {"temperature": (1.0, 2.0, 4.0)},
}
"""Method -> field -> values of table 18. Our solvers are exact, so the inner steps of Nash-MTL and
the Frank-Wolfe iterations of MGDA have no field, and MGDA has nothing to tune."""


@dataclass(frozen=True)
class Candidate:
    """One point of a method's grid."""

    method: str
    fields: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The name of its runs' folders."""
        return "-".join([self.method, *(f"{key}-{value}" for key, value in self.fields.items())])

    def config(
        self, data: Mapping[str, Any], changes: Sequence[str], seed: int, label: str
    ) -> TrainConfig:
        """The configuration of its run; changes: `key=value` overrides."""
        method = {"name": self.method, **self.fields}
        return arm_config(data, Arm(label, method), seed, changes)


def candidates(method: str) -> list[Candidate]:
    """The points of the method's grid."""
    grid = GRIDS[method]
    points = itertools.product(*grid.values())
    return [Candidate(method, dict(zip(grid, point, strict=True))) for point in points]


def tune(
    data: Mapping[str, Any],
    methods: Sequence[str],
    validation: str,
    changes: Sequence[str] = (),
    *,
    test: str | None = None,
    seeds: int = 1,
    jobs: int = 1,
) -> dict[str, Any]:
    """Train every candidate, choose one per method, and test it; returns what tuning.json has.

    Raises:
        ConfigError: the validation rows are also trained on or tested with, or a run failed.
    """
    held_out = (test, data.get("data", {}).get("prompts"), data.get("data", {}).get("demos"))
    if validation in held_out:
        raise ConfigError(f"--validation {validation}: use rows that nothing else uses")
    tried = [candidate for method in methods for candidate in candidates(method)]
    on = [*changes, f"eval.data.prompts={validation}"]
    configs = {
        (c.label, seed): c.config(data, on, seed, c.label) for c in tried for seed in range(seeds)
    }
    accuracies = _accuracies(configs, jobs)
    rows = [
        {
            "method": c.method,
            "fields": dict(c.fields),
            "validation": [accuracies[c.label, seed] for seed in range(seeds)],
        }
        for c in tried
    ]
    for row in rows:
        row["mean"] = math.fsum(row["validation"]) / seeds
    chosen = {
        method: max((row for row in rows if row["method"] == method), key=lambda row: row["mean"])
        for method in methods
    }
    for row in rows:
        row["chosen"] = row is chosen[row["method"]]
    if test is not None:
        _test(data, chosen, [*changes, f"eval.data.prompts={test}"], seeds, jobs)
    keys = {"set": list(changes), "validation": validation, "test": test, "seeds": seeds}
    return {**origin(), "keys": keys, "candidates": rows}


def _test(
    data: Mapping[str, Any],
    chosen: Mapping[str, dict[str, Any]],
    changes: Sequence[str],
    seeds: int,
    jobs: int,
) -> None:
    """Add the test accuracies of the chosen candidates, with seeds that chose nothing."""
    fresh = range(seeds, 2 * seeds)
    configs = {
        (method, seed): Candidate(method, row["fields"]).config(
            data, changes, seed, f"{method}-test"
        )
        for method, row in chosen.items()
        for seed in fresh
    }
    accuracies = _accuracies(configs, jobs)
    for method, row in chosen.items():
        row["test"] = [accuracies[method, seed] for seed in fresh]


def _accuracies(
    configs: Mapping[tuple[str, int], TrainConfig], jobs: int
) -> dict[tuple[str, int], float]:
    if failed := run_all(list(configs.values()), jobs):
        raise ConfigError(f"{len(failed)} runs failed, e.g. {next(iter(failed.items()))}: rerun")
    finals = {key: result(config) for key, config in configs.items()}
    return {key: r["final"]["accuracy"] for key, r in finals.items() if r is not None}


def table(results: Mapping[str, Any]) -> str:
    """Every candidate, the chosen ones in bold, in percent."""
    lines = []
    for row in results["candidates"]:
        fields = ", ".join(f"{key}={value}" for key, value in row["fields"].items()) or "-"
        test = row.get("test")
        cells = [f"`{row['method']}`", fields, percent(row["mean"])]
        cells = [f"**{cell}**" for cell in cells] if row["chosen"] else cells
        lines.append([*cells, percent(math.fsum(test) / len(test)) if test else ""])
    return markdown_table(["method", "fields", "validation", "test"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run what is missing, write tuning.json; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.tuning", description=__doc__)
    parser.add_argument("config", type=Path, help="a configuration of `gac train`")
    parser.add_argument("--validation", required=True, help="rows on which to tune")
    parser.add_argument("--test", help="rows on which the chosen candidates are tested")
    parser.add_argument("--methods", nargs="+", default=list(GRIDS), choices=GRIDS)
    parser.add_argument("--seeds", type=int, default=1, help="runs per candidate")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other keys")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    find_user_code(args.config)
    data, _ = read_study(args.config)
    first = candidates(args.methods[0])[0]
    changes = [*args.set, f"eval.data.prompts={args.validation}"]
    out = Path(first.config(data, changes, 0, "x").out).parent
    results = tune(
        data,
        args.methods,
        args.validation,
        args.set,
        test=args.test,
        seeds=args.seeds,
        jobs=args.jobs,
    )
    (out / "tuning.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results), f"\nResults: {out / 'tuning.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
