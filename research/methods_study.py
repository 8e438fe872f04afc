"""Runs every method on the demo task with several seeds: `python -m research.methods_study`.

Finished runs are kept, so the command can be interrupted and rerun. The results go to
research/results/methods_study.json, and from there to the tables of research/methods.md; rows of
methods that were not selected are left unchanged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gac.config import dump, to_yaml
from gac.demo.run import demo_fields, make_base, method_config
from gac.demo.task import write_task
from gac.evaluation.table import markdown_table
from gac.methods import METHODS
from gac.report.statistics import mean_sd
from gac.study.command import Arm, arm_config
from gac.study.runs import result, run_all
from gac.train_config import TrainConfig
from research.ablations import ABLATIONS
from tools.origin import origin

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results" / "methods_study.json", HERE / "methods.md"
GRID = (0.1, 0.3, 0.5, 0.7, 0.9)  # constant weights; the best is chosen in hindsight
HINDSIGHT = "best constant in hindsight"
WITH_TEACHER = ("opd", "kdrl")  # learn from a second model, which the demo task does not have
NAMES = [*(name for name in METHODS if name not in WITH_TEACHER), *ABLATIONS]
INTRODUCTION = """\
# Every method on the demo task

<!-- written by python -m research.methods_study; do not edit -->

The [methods](../docs/methods.md) page says what they are. `moco` with its default keys collapses
on this task (2.3%); we did not look for keys that work.
"""
VARIANTS = """\
## Ablations of gac

These settings of `gac` are not methods of their own; `research/ablations.py` has them, and the
classes that they name. The results are from the same runs as those above.
"""
STUDY = """\
Greedy accuracy in percent on the demo task's 200 held-out problems after {steps} steps, mean and
standard deviation over {seeds} seeds. `+` can be
learned from rewards only, `-` needs demonstrations; the demonstrations are weak (a borrow is
forgotten with probability 0.3). Methods marked *same* had such a demonstration for every
subtraction among the prompts, the others 256 separate ones, so the two groups saw different data.
All methods use one learning rate, and nothing was tuned. With 100 problems of each kind and a
single base model, differences of a few points are not meaningful. Schedules are scaled to the
length of the run (`gac/demo/run.py`).
"""
MEASURES = ("all", "+", "-", "training time (s)")
DEMOS = {"prompt": "same", "separate": "separate", "none": "none"}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run what is missing and write the results; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.methods_study", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for all runs")
    parser.add_argument("--methods", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--seeds", type=int, default=3, help="seeds per method")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps per run")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of parallel runs, one thread each",
    )
    parser.add_argument(
        "--base-steps", type=int, default=400, help="training steps of the base model"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="output file for the table")
    parser.add_argument(
        "--busy", action="store_true", help="omit the timings, because other work is running"
    )
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if not (args.out / "task" / "init" / "config.json").exists():
        write_task(args.out / "task", seed=0)
    base = make_base(args.out, args.base_steps)
    runs = dict(plan(args.out, base, args.methods, args.seeds, args.steps))
    failed = run_all([config for configs in runs.values() for config in configs], args.jobs)
    if failed:
        return 1
    setting = {"steps": args.steps, "seeds": args.seeds, "machine": platform.machine()}
    rows = summarize(runs)
    if args.busy:
        rows = [row | {"seconds": None} for row in rows]
    rows = [row | origin() for row in rows]
    rows = merged(rows, args.results, setting)
    study = {"setting": setting, "rows": rows}
    args.results.write_text(json.dumps(study, indent=1) + "\n")
    print(f"wrote {args.results}")
    if args.results == RESULTS:
        PAGE.write_text(page(study))
        print(f"wrote {PAGE}")
    return 0


def merged(new: list[dict[str, Any]], path: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Merge `new` with the rows in `path` whose methods are not in `new`; sort by method.

    Raises:
        ValueError: the file's rows were measured with different settings.
    """
    old: dict[str, Any] = {"setting": setting, "rows": []}
    if path.exists():
        old = json.loads(path.read_text())
    replaced = {_method(row) for row in new}
    kept = [row for row in old["rows"] if _method(row) not in replaced]
    if kept and old["setting"] != setting:
        raise ValueError(
            f"{path}: {len(kept)} existing rows have settings {old['setting']}, but the new rows "
            f"have {setting}: use the same steps and seeds, run all methods, or choose another "
            "--results"
        )
    order = [*NAMES, HINDSIGHT]
    return sorted([*new, *kept], key=lambda row: order.index(_method(row)))


def _method(row: dict[str, Any]) -> str:
    """The method of a row; the best constant counts as one method, whatever its value."""
    return HINDSIGHT if row["name"].startswith(HINDSIGHT) else row["name"]


def plan(
    out: Path, base: Path, methods: Sequence[str], seeds: int, steps: int
) -> Iterator[tuple[str, list[TrainConfig]]]:
    """Yield each table row with its runs, one per seed."""
    arms = {name: {"name": name, **demo_fields(name, steps)} for name in methods if name in METHODS}
    for name in [name for name in methods if name in ABLATIONS]:
        scaled = demo_fields("gac", steps)
        if ABLATIONS[name].get("prior_blend") == 1:
            scaled = {key: value for key, value in scaled.items() if key != "prior"}
        arms[name] = {"name": "gac", **scaled, **ABLATIONS[name]}
    if "constant" in methods:
        arms |= {f"mu={mu}": {"name": "constant", "mu": mu} for mu in GRID}
    for label, method in arms.items():
        data = dump(method_config(out, base, method["name"], 0, steps)) | {"out": str(out)}
        yield label, [arm_config(data, Arm(label, method), seed) for seed in range(seeds)]


def summarize(runs: dict[str, list[TrainConfig]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds of the final accuracies and the training time."""
    rows = [{"name": name, **_statistics(configs)} for name, configs in runs.items()]
    grid = [row for row in rows if row["name"].startswith("mu=")]
    rows = [row for row in rows if row not in grid]
    if grid:
        best = max(grid, key=lambda row: row["accuracy"][0])
        rows.append({**best, "name": f"{HINDSIGHT} ({best['name']})"})
    return rows


def _statistics(configs: Sequence[TrainConfig]) -> dict[str, Any]:
    runs = [run for config in configs if (run := result(config)) is not None]
    columns = {"accuracy": "accuracy", "+": "accuracy/+", "-": "accuracy/-"}
    means = {
        key: _mean_deviation([run["final"][name] for run in runs]) for key, name in columns.items()
    }
    seconds = _mean_deviation([run["seconds"] for run in runs])
    method, completions = configs[0].method, configs[0].rollouts.num_generations
    uses_demos = any(method.needs(step).demos for step in range(configs[0].steps))
    demos = method.sampling(completions).demos if uses_demos else "none"
    return {"demos": demos, **means, "seconds": seconds}


def _mean_deviation(values: Sequence[float]) -> list[float]:
    mean, deviation = mean_sd(values)
    return [round(mean, 4), 0.0 if math.isnan(deviation) else round(deviation, 4)]


def page(study: dict[str, Any]) -> str:
    """Render research/methods.md from the results."""
    setting, measured = study["setting"], {row["name"]: _cells(row) for row in study["rows"]}
    text = STUDY.format(steps=setting["steps"], seeds=setting["seeds"])
    results = [(f"`{name}`", *row) for name, row in measured.items() if name not in ABLATIONS]
    missing = [f"`{name}`" for name in METHODS if name not in measured]
    note = f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    table = markdown_table(("method", "demonstrations", *MEASURES), results)
    settings = [
        (f"`{label}`", f"`{to_yaml(fields, inline=True)}`", *measured[label][1:])
        for label, fields in ABLATIONS.items()
        if label in measured
    ]
    ablations = markdown_table(("label", "fields of `gac`", *MEASURES), settings)
    return "\n".join([INTRODUCTION, text, f"{table}\n{note}", VARIANTS, f"{ablations}\n"])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The demonstrations and MEASURES of a row of the study."""
    shares = [f"{100 * row[key][0]:.1f} ± {100 * row[key][1]:.1f}" for key in ("accuracy", *"+-")]
    seconds = "not measured" if row["seconds"] is None else f"{row['seconds'][0]:.0f}"
    return DEMOS[row["demos"]], *shares, seconds


if __name__ == "__main__":
    sys.exit(main())
