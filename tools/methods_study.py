"""Every method on the demo's task, over several seeds: `python -m tools.methods_study`.

Runs that are finished are kept, so the command may be stopped and given again. The table goes to
docs/methods_study.json, from which `python -m tools.methods_table` writes docs/methods.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gac.config import dump, load
from gac.demo.run import make_base, method_config
from gac.demo.task import write_task
from gac.faults.checkpoint import complete
from gac.methods import METHODS
from gac.methods.constant import Constant
from gac.report.statistics import mean_sd
from gac.train_config import TrainConfig

RESULTS = Path("docs") / "methods_study.json"
GRID = (0.1, 0.3, 0.5, 0.7, 0.9)  # constant weights from which the best is taken in hindsight
HINDSIGHT = "best constant in hindsight"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run what is missing, write the results; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.methods_study", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of all runs")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds per method")
    parser.add_argument("--steps", type=int, default=160, help="optimiser steps per run")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)),
                        help="runs at a time, one thread each")  # fmt: skip
    parser.add_argument("--base-steps", type=int, default=400, help="of the model to start from")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table goes")
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if not (args.out / "task" / "init" / "config.json").exists():
        write_task(args.out / "task", seed=0)
    base = make_base(args.out, args.base_steps)
    runs = dict(plan(args.out, base, args.methods, args.seeds, args.steps))
    run_all([config for configs in runs.values() for config in configs], args.jobs)
    setting = {"steps": args.steps, "seeds": args.seeds, "machine": platform.machine()}
    text = json.dumps({"setting": setting, "rows": summarize(runs)}, indent=1)
    args.results.write_text(text + "\n")
    print(f"wrote {args.results}")
    return 0


def plan(
    out: Path, base: Path, methods: Sequence[str], seeds: int, steps: int
) -> Iterator[tuple[str, list[TrainConfig]]]:
    """Each row of the table with the runs behind it, one per seed."""
    for name in methods:
        yield name, [method_config(out, base, name, seed, steps) for seed in range(seeds)]
    if "constant" in methods:
        for mu in GRID:
            yield f"mu={mu}", [_constant(out, base, mu, seed, steps) for seed in range(seeds)]


def _constant(out: Path, base: Path, mu: float, seed: int, steps: int) -> TrainConfig:
    config = method_config(out, base, "constant", seed, steps)
    folder = str(out / f"constant-{mu}-{seed}")
    return dataclasses.replace(config, method=Constant(mu=mu), out=folder, name=f"mu={mu}")


def run_all(configs: Sequence[TrainConfig], jobs: int) -> None:
    """Train what is not finished, `jobs` at a time; a failure stops the rest."""
    waiting = [config for config in configs if not _final(config)]
    started = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn) as pool:
        going = {pool.submit(_run, dump(config)): config for config in waiting}
        try:
            for done, future in enumerate(as_completed(going), start=1):
                future.result()
                spent = time.perf_counter() - started
                print(f"{done} of {len(waiting)}: {going[future].out}, {spent:.0f} s", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _run(plain: dict[str, Any]) -> None:
    """In a process of its own: quiet, and a finished run is marked."""
    config = load(TrainConfig, plain)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    sys.stderr = (Path(config.out) / "log.txt").open("a")
    from gac.training.trainer import train

    train(config)
    (Path(config.out) / "done").touch()


def _final(config: TrainConfig) -> dict[str, Any]:
    """The evaluation that a run ends with; empty while it is not finished."""
    out = Path(config.out)
    if not (out / "done").exists() or not complete(out / "checkpoints"):
        return {}
    found = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    if config.method.keeps_best:
        found = [row for row in found if row["step"] > 0]  # the start model is no candidate
        return max(found, key=lambda row: row["accuracy"])
    return found[-1]


def summarize(runs: dict[str, list[TrainConfig]]) -> list[dict[str, Any]]:
    """Mean and deviation over seeds of the final accuracies, and of the seconds of training."""
    rows = [{"name": name, **_statistics(configs)} for name, configs in runs.items()]
    grid = [row for row in rows if row["name"].startswith("mu=")]
    rows = [row for row in rows if row not in grid]
    if grid:
        best = max(grid, key=lambda row: row["accuracy"][0])
        rows.append({**best, "name": f"{HINDSIGHT} ({best['name']})"})
    return rows


def _statistics(configs: Sequence[TrainConfig]) -> dict[str, Any]:
    finals = [_final(config) for config in configs]
    seconds = []
    for config in configs:
        lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
        seconds.append(sum(json.loads(line)["seconds"] for line in lines))
    columns = {"accuracy": "accuracy", "+": "accuracy/+", "-": "accuracy/-"}
    found = {key: _mean_deviation([row[name] for row in finals]) for key, name in columns.items()}
    method, completions = configs[0].method, configs[0].rollouts.completions
    reads = any(method.needs(step).demos for step in range(configs[0].steps))
    demos = method.sampling(completions).demos if reads else "none"
    return {"demos": demos, **found, "seconds": _mean_deviation(seconds)}


def _mean_deviation(values: Sequence[float]) -> list[float]:
    mean, deviation = mean_sd(values)
    return [round(mean, 4), 0.0 if math.isnan(deviation) else round(deviation, 4)]


if __name__ == "__main__":
    sys.exit(main())
