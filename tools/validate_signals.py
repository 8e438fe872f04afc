"""Checks how well the signal sources track the true gradients: `python -m tools.validate_signals`.

Trains the demo's task at a constant mu. Every few steps, each source measures the same batch under
the same weights. `GradientSignals` over all parameters is the ground truth: it is unbiased, though
it has the noise of the batch. Writes docs/signals.json, and its tables to docs/signals.md.
Finished runs are kept in --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gac.config import dump
from gac.control.evidence import Evidence, Reading
from gac.control.signals import AccumulatorSignals, GradientSignals, ProxySignals, SketchSignals
from gac.methods.base import Mix
from gac.study.arms import Arm, arm_config
from gac.training.gradients import Gradients
from gac.training.run_config import TrainConfig
from gac.training.step import Step
from gac.training.trainer import Trainer
from tools.scenario_study import SMALLER, STEPS, scenarios

SCENARIOS = ("base", "spoil")
PARTS = 8  # micro-batches per side for the ground-truth gradients, one prompt each
EVERY, TIMED = 3, 30  # steps between measurements, and between cost measurements
REPEATS = 3
SIZES = (16, 64)
DECAY = 0.8  # decay of the running averages, which are also compared
QUANTITIES = ("disagreement", "sft_variance", "rl_variance", "inner", "cosine")
TRUTH = "gradients"
SOURCES = ("proxy", "sketch", "sketch-64", "accumulator")
BLOCK, DRAWS = 5, 2000
RESULTS, PAGE = Path("docs") / "signals.json", Path("docs") / "signals.md"
MARK = "<!-- below: python -m tools.validate_signals -->\n"
PAPER = {"disagreement": 0.84, "sft_variance": 0.76, "rl_variance": 0.82}


class Watched:
    """Wraps the trainer's gradients and, every few steps, measures the same step with each source."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.rows: list[dict[str, Any]] = []
        self.costs: list[dict[str, float]] = []
        self.left = math.nan  # CPU time when control last returned to the trainer
        self.accumulated = AccumulatorSignals().init()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gradients, name)

    def __call__(self, step: Step) -> Any:
        rest = time.process_time() - self.left  # rest of the step: sampling, update, logging
        if step.number % EVERY == 0:
            self.rows.append(self.measure(step))
        if step.number % TIMED == TIMED - 1:
            self.costs.append({"rest": rest, **self.time(step)})
        found = self.gradients(step)
        self.left = time.process_time()
        return found

    def measure(self, step: Step) -> dict[str, Any]:
        """Readings of every source for `step`, by source name."""
        found = self._run(step, parts=PARTS, sketch=SIZES[0])
        evidence = Evidence(step.number, found.moments, found.gram, PARTS, sketches=found.sketches)
        readings = {
            TRUTH: GradientSignals().read(evidence, {})[0],
            "proxy": ProxySignals().read(evidence, {})[0],
            "sketch": SketchSignals(SIZES[0]).read(evidence, {})[0],
        }
        larger = Evidence(step.number, sketches=self._run(step, sketch=SIZES[1]).sketches)
        readings[f"sketch-{SIZES[1]}"] = SketchSignals(SIZES[1]).read(larger, {})[0]
        norms = Evidence(step.number, norms=self._run(step, norms=True).norms)
        readings["accumulator"], self.accumulated = AccumulatorSignals().read(
            norms, self.accumulated
        )
        return {"step": step.number, **{name: _plain(r) for name, r in readings.items()}}

    def time(self, step: Step) -> dict[str, float]:
        """CPU seconds to compute a step's gradients, plain and as required by each source."""
        variants: dict[str, dict[str, Any]] = {
            "plain": {},
            "sketch": {"sketch": SIZES[0]},
            "gradients": {"parts": 4},
            "accumulator": {"norms": True},
        }
        spent: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(REPEATS):
            for name, needs in variants.items():
                start = time.process_time()
                self._run(step, **needs)
                spent[name].append(time.process_time() - start)
        return {name: min(values) for name, values in spent.items()}

    def _run(self, step: Step, **needs: Any) -> Any:
        """Run the passes of `step` with additional `needs` and both terms at weight 1/2, then clear
        the gradients.

        norms: use micro-batches of one prompt.
        """
        changed = step.needs._replace(signals=True, **needs)
        inner, micro = self.gradients, self.gradients.micro
        if changed.norms:
            prompt = len({r.sequence for r in step.rows if r.unit == 0})
            inner.micro = dataclasses.replace(micro, rows=prompt)
        found = inner(dataclasses.replace(step, mix=Mix(0.5), needs=changed))
        inner.micro = micro
        for parameter in inner.model.parameters():
            parameter.grad = None
        return found


def _plain(reading: Reading) -> dict[str, float | None]:
    """Round to five significant digits; None if unknown."""
    known = reading.signals._asdict()
    if reading.alignment is not None:
        known |= reading.alignment._asdict()
    return {k: float(f"{v:.5g}") if math.isfinite(v) else None for k, v in known.items()}


def run(config: TrainConfig) -> dict[str, Any]:
    """Measurements and costs of one run, loaded from its file if it exists."""
    path = Path(config.out).parent / f"{Path(config.out).name}.json"
    if not path.exists():
        trainer = Trainer(config, resume=False)
        watched = Watched(trainer.gradients)
        vars(trainer)["gradients"] = watched
        trainer.run()
        path.write_text(json.dumps({"rows": watched.rows, "costs": watched.costs}))
    return json.loads(path.read_text())


# ---- from measurements to correlations


def series(rows: Sequence[dict[str, Any]], source: str, quantity: str, smooth: bool) -> np.ndarray:
    """One number per measurement, nan if unknown; smooth: use running averages."""
    names = ("inner", "sft_square", "rl_square") if quantity == "cosine" else (quantity,)
    columns = [_column(rows, source, name, smooth) for name in names]
    if quantity != "cosine":
        return columns[0]
    inner, sft, rl = columns
    with np.errstate(invalid="ignore", divide="ignore"):
        found = inner / np.sqrt(np.where((sft > 0) & (rl > 0), sft * rl, math.nan))
    return np.clip(found, -1, 1)


def _column(rows: Sequence[dict[str, Any]], source: str, name: str, smooth: bool) -> np.ndarray:
    values = [row[source].get(name) for row in rows]
    found = np.array([math.nan if value is None else value for value in values])
    if not smooth:
        return found
    average, out = math.nan, []
    for value in found:
        if math.isfinite(value):
            average = value if math.isnan(average) else DECAY * average + (1 - DECAY) * value
        out.append(average)
    return np.array(out)


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson correlation where both are known; nan for fewer than three points or a constant
    series.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def compare(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any] | None:
    """Mean of the per-run correlations, with its interval, and the same for shuffled steps.

    The bootstrap resamples runs and, within each run, blocks of neighboring measurements.
    """
    each = [correlation(x, y) for x, y in pairs]
    if not any(map(math.isfinite, each)):
        return None
    rng = np.random.default_rng(0)

    def resampled(pick: Callable[[int], np.ndarray], whole: bool) -> list[float]:
        means = []
        for _ in range(DRAWS):
            runs = range(len(pairs)) if whole else rng.integers(len(pairs), size=len(pairs))
            found = []
            for i in runs:
                x, y = pairs[i]
                index = pick(len(x))
                found.append(correlation(x[index], y if whole else y[index]))
            known = [value for value in found if math.isfinite(value)]
            if known:
                means.append(float(np.mean(known)))
        return means

    def blocks(count: int) -> np.ndarray:
        starts = rng.integers(count - BLOCK + 1, size=-(-count // BLOCK))
        return (starts[:, None] + np.arange(BLOCK)).ravel()[:count]

    resamples, controls = resampled(blocks, False), resampled(rng.permutation, True)
    ends = [
        np.quantile(values, (0.025, 0.975)).round(3).tolist() for values in (resamples, controls)
    ]
    mean = float(np.nanmean(each))
    return {
        "mean": round(mean, 3),
        "ci95": ends[0],
        "runs": [_round(value) for value in each],
        "shuffled": round(float(np.mean(controls)), 3),
        "shuffled95": ends[1],
    }


def _round(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def correlations(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Correlations by scenario and view ("each" or "averaged"), source and quantity."""
    found: dict[str, Any] = {}
    for scenario in SCENARIOS:
        mine = [run["rows"] for name, run in runs.items() if name.startswith(f"{scenario}-")]
        for view, smooth in (("each", False), ("averaged", True)):
            found[f"{scenario}, {view}"] = {
                source: {
                    quantity: compare(
                        [
                            (
                                series(rows, source, quantity, smooth),
                                series(rows, TRUTH, quantity, smooth),
                            )
                            for rows in mine
                        ]
                    )
                    for quantity in QUANTITIES
                }
                for source in SOURCES
            }
    return found


def costs(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Extra CPU time of a measured step in percent of a plain one: median and 95 % interval."""
    rows = [row for run in runs.values() for row in run["costs"] if math.isfinite(row["rest"])]
    found = {}
    for name in ("sketch", "accumulator", "gradients"):
        extra = np.array([(r[name] - r["plain"]) / (r["rest"] + r["plain"]) for r in rows])
        rng = np.random.default_rng(0)
        draws = np.median(extra[rng.integers(len(extra), size=(DRAWS, len(extra)))], 1)
        ends = (100 * np.quantile(draws, (0.025, 0.975))).round(2).tolist()
        found[name] = {"percent": round(100 * float(np.median(extra)), 2), "ci95": ends}
    return found


# ---- the page


def tables(study: dict[str, Any]) -> str:
    """The Markdown below the marker in docs/signals.md."""
    parts = [f"{study['setting']['words']}\n"]
    head = ("source", *(f"`{name}`" for name in QUANTITIES))
    for title, by_source in study["correlations"].items():
        rows = [
            [f"`{source}`", *(_cell(cells[q]) for q in QUANTITIES)]
            for source, cells in by_source.items()
        ]
        control = [_control(by_source["sketch"][q]) for q in QUANTITIES]
        rows.append(["`sketch`, steps shuffled", *control])
        if title == "base, each":
            claims = [f"{PAPER[q]:.2f}" if q in PAPER else "-" for q in QUANTITIES]
            rows.append(["the paper's claim for its proxies", *claims])
        parts.append(f"## {title.capitalize()}\n\n{_markdown(head, rows)}\n")
    rows = [
        [f"`{name}`", f"{cost['percent']:.2f} %", f"[{cost['ci95'][0]:.2f}, {cost['ci95'][1]:.2f}]"]
        for name, cost in study["cost"].items()
    ]
    parts.append(
        "## Cost of a measuring step\n\n"
        + _markdown(("source", "share of a step", "95 % interval"), rows)
        + "\n"
    )
    return "\n".join(parts)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['mean']:.2f} [{found['ci95'][0]:.2f}, {found['ci95'][1]:.2f}]"


def _control(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    low, high = found["shuffled95"]
    return f"{found['shuffled']:.2f} [{low:.2f}, {high:.2f}]"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the results and the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.validate_signals", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/signals"), help="folder for the runs"
    )
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    plain = {name: dump(config) for name, config in scenarios(args.out).items()}
    method = Arm("mu", {"name": "constant", "mu": 0.5})
    runs = {}
    for seed in range(args.seeds):
        for name in SCENARIOS:
            changes = [*SMALLER, f"out={args.out / name}", "eval.every=0"]
            runs[f"{name}-{seed}"] = run(arm_config(plain[name], method, seed, changes))
            print(f"{name}, seed {seed}: {len(runs[f'{name}-{seed}']['rows'])} measurements")
    words = (
        f"Written by `python -m tools.validate_signals --seeds {args.seeds}`: {args.seeds} seeds, "
        f"{STEPS} steps at mu = 0.5, measured every {EVERY} steps."
    )
    setting = {
        "seeds": args.seeds,
        "steps": STEPS,
        "every": EVERY,
        "changes": SMALLER,
        "parts": PARTS,
        "decay": DECAY,
        "words": words,
    }
    study = {
        "setting": setting,
        "correlations": correlations(runs),
        "cost": costs(runs),
        "runs": runs,
    }
    RESULTS.write_text(json.dumps(study) + "\n")
    top = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(top + MARK + "\n" + tables(study))
    print(f"wrote {RESULTS} and {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
