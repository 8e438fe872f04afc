"""Measures how well the signal sources track the true gradients: the paper's tables 11 to 13.

Usage: `python -m research.validate_signals`. Trains on the demo's task at a constant mu. Every few
steps, each source measures the same batch with the same weights. `GradientSignals` over all
parameters is the reference: it is unbiased but contains the noise of the batch. One control pairs a
source with the reference at other steps; two others (the paper's table 12) compute the disagreement
after shuffling phi or the advantages over the batch's tokens. Writes research/results/signals.json
and the tables of research/signals.md. Finished runs stay in --out.

With `--model DIR` (written by `python -m tools.real_model DIR`), the runs are those of a pretrained
model: `gac demo --real`'s task and, with $GAC_DATA, MMLU-Pro. With `--config run.yaml`, they are
those of that configuration of `gac train`; the results go to --out only.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gac.config import dump
from gac.control.signals import GradientSignals, ProxySignals, Reading
from gac.evaluation.table import markdown_table
from gac.imports import find_user_code
from gac.study.command import Arm, arm_config, read_study
from gac.train_config import TrainConfig
from gac.training.gradients import Gradients
from gac.training.step import Step
from gac.training.trainer import Trainer
from gac.types import Mix
from research.scenarios import real_scenarios, write_scenarios
from tools.origin import origin

SCENARIOS = ("base", "spoil")
STEPS, REAL_STEPS = 120, 30
SMALLER = ("rollouts.num_prompts=8", "rollouts.num_generations=6", "demo_batch_size=16")
LARGER = ("rollouts.num_prompts=8",)  # of the real runs: a multiple of REAL_PARTS
PARTS, REAL_PARTS = 8, 4  # micro-batches per term for the reference gradients, of equal prompts
EVERY, TIMED = 3, 30  # steps between measurements (of a real run: 1), and of the cost
REPEATS = 3  # cost measurements per step; the smallest one is used
DECAY = 0.8  # of the running averages
QUANTITIES = ("disagreement", "sft_variance", "rl_variance")
TRUTH = "gradients"
SHUFFLED = ("phi shuffled", "advantages shuffled")  # over tokens; only the disagreement
SOURCES = ("proxy", *SHUFFLED)
VIEWS = {"each": "single", "averaged": "averages"}
BLOCK, RESAMPLES = 5, 2000  # measurements per block of the bootstrap, and its resamples
HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results" / "signals.json", HERE / "signals.md"
REAL_RESULTS = HERE / "results" / "signals_real.json"
MARK = "<!-- below: python -m research.validate_signals -->\n"
PAPER = {  # what it claims
    "its proxies": {"disagreement": 0.84, "sft_variance": 0.76, "rl_variance": 0.82},
    "phi shuffled": {"disagreement": 0.09},
    "advantages shuffled": {"disagreement": 0.12},
}


class MeasuredGradients:
    """The trainer's gradient computation; every few steps, each source measures the step too."""

    def __init__(self, gradients: Gradients, every: int, parts: int) -> None:
        self.gradients, self.every, self.parts = gradients, every, parts
        self.rows: list[dict[str, Any]] = []
        self.costs: list[dict[str, float]] = []
        self.returned_at = math.nan  # CPU time of the last return to the trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gradients, name)

    def __call__(self, step: Step) -> Any:
        rest = time.process_time() - self.returned_at  # rest of the step: sampling, update, logging
        if step.number % self.every == 0:
            self.rows.append(self.measure(step))
        if step.number % TIMED == TIMED - 1:
            self.costs.append({"rest": rest, **self.measure_costs(step)})
        measured = self.gradients(step)
        self.returned_at = time.process_time()
        return measured

    def measure(self, step: Step) -> dict[str, Any]:
        """Readings of every source for `step`, by source name."""
        evidence = self._run(step, parts=self.parts).evidence
        readings = {
            TRUTH: GradientSignals().read(evidence, {})[0],
            "proxy": ProxySignals().read(evidence, {})[0],
        }
        plain = {name: _plain(reading) for name, reading in readings.items()}
        return {"step": step.number, **plain, **self.measure_shuffled(step)}

    def measure_shuffled(self, step: Step) -> dict[str, dict[str, float | None]]:
        """The disagreement after shuffling one of its coefficients over all rollout tokens."""
        rows = [row for row in step.rows if not row.is_demo]
        logps = self.gradients.forward.row_logprobs(rows)
        p = torch.cat(logps).double().exp()
        phi = p * (1 - p)
        lengths = torch.tensor([len(x) for x in logps])
        advantages = torch.tensor([row.advantage for row in rows]).double()
        advantages = advantages.repeat_interleave(lengths)
        shares = (1 / lengths.double()).repeat_interleave(lengths)
        order = torch.randperm(len(p), generator=torch.Generator().manual_seed(step.number))
        pairs = (phi[order], advantages), (phi, advantages[order])
        return {
            name: {"disagreement": _rounded(disagreement(*pair, shares))}
            for name, pair in zip(SHUFFLED, pairs, strict=True)
        }

    def measure_costs(self, step: Step) -> dict[str, float]:
        """CPU seconds of a gradient pass: plain, and with separate gradients."""
        variants: dict[str, dict[str, Any]] = {"plain": {}, "gradients": {"parts": 4}}
        spent: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(REPEATS):
            for name, needs in variants.items():
                start = time.process_time()
                self._run(step, **needs)
                spent[name].append(time.process_time() - start)
        return {name: min(values) for name, values in spent.items()}

    def _run(self, step: Step, **needs: Any) -> Any:
        """Run `step` with additional `needs` and both terms at weight 1/2; clear the gradients."""
        step_needs = step.needs._replace(signals=True, **needs)
        measured = self.gradients(dataclasses.replace(step, mix=Mix(0.5), needs=step_needs))
        for parameter in self.gradients.model.parameters():
            parameter.grad = None
        return measured


def disagreement(phi: Tensor, advantages: Tensor, shares: Tensor) -> float:
    """The paper's equation 9 over rollout tokens [N]; nan if a coefficient is constant.

    shares: 1 / length of the token's rollout, so that each rollout counts once.
    """
    shares = shares / shares.sum()
    scores = []
    for coefficient in (phi, advantages):
        centered = coefficient - shares @ coefficient
        scores.append(centered / (shares @ centered.square()).sqrt())
    return float(shares @ (scores[0] - scores[1]).square())


def _plain(reading: Reading) -> dict[str, float | None]:
    """Values by name; None if unknown."""
    values = reading.signals._asdict()
    if reading.alignment is not None:
        values |= reading.alignment._asdict()
    return {name: _rounded(value) for name, value in values.items()}


def _rounded(value: float) -> float | None:
    """`value` with five significant digits; None if it is unknown."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def run(config: TrainConfig, every: int, parts: int) -> dict[str, Any]:
    """Measurements and costs of one run, loaded from its file if it exists.

    every: steps between measurements. parts: micro-batches per term.
    """
    path = Path(config.out).parent / f"{Path(config.out).name}.json"
    if not path.exists():
        trainer = Trainer(config, resume=False)
        gradients = MeasuredGradients(trainer.gradients, every, parts)
        vars(trainer)["gradients"] = gradients
        trainer.run()
        path.write_text(json.dumps({"rows": gradients.rows, "costs": gradients.costs}))
    return json.loads(path.read_text())


# ---- from measurements to correlations


def _with_reference(
    rows: Sequence[dict[str, Any]], source: str, quantity: str, smooth: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The series of a source and of the reference."""
    return series(rows, source, quantity, smooth), series(rows, TRUTH, quantity, smooth)


def series(rows: Sequence[dict[str, Any]], source: str, name: str, smooth: bool) -> np.ndarray:
    """One value per measurement, or a running average if `smooth`; nan if unknown."""
    plain = [row[source].get(name) for row in rows]
    values = np.array([math.nan if value is None else value for value in plain])
    if not smooth:
        return values
    average, averages = math.nan, []
    for value in values:
        if math.isfinite(value):
            average = value if math.isnan(average) else DECAY * average + (1 - DECAY) * value
        averages.append(average)
    return np.array(averages)


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson correlation over the points at which both are finite.

    It is nan for fewer than three points or a constant series.
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
    by_run = [correlation(x, y) for x, y in pairs]
    if not any(map(math.isfinite, by_run)):
        return None
    rng = np.random.default_rng(0)

    def resampled(pick: Callable[[int], np.ndarray], shuffle: bool) -> list[float]:
        """Mean correlation of each resample; `pick(n)` draws row indices for a run of n rows.

        The runs are resampled as well, unless `shuffle`: then all are used, and x is permuted but
        y is not.
        """
        means = []
        for _ in range(RESAMPLES):
            runs = range(len(pairs)) if shuffle else rng.integers(len(pairs), size=len(pairs))
            values = []
            for i in runs:
                x, y = pairs[i]
                index = pick(len(x))
                values.append(correlation(x[index], y if shuffle else y[index]))
            known = [value for value in values if math.isfinite(value)]
            if known:
                means.append(float(np.mean(known)))
        return means

    def blocks(count: int) -> np.ndarray:
        starts = rng.integers(count - BLOCK + 1, size=-(-count // BLOCK))
        return (starts[:, None] + np.arange(BLOCK)).ravel()[:count]

    resamples, controls = resampled(blocks, False), resampled(rng.permutation, True)
    return {
        "mean": round(float(np.nanmean(by_run)), 3),
        "ci95": _interval(resamples),
        "runs": [round(value, 3) if math.isfinite(value) else None for value in by_run],
        "shuffled": round(float(np.mean(controls)), 3),
        "shuffled95": _interval(controls),
    }


def _interval(values: Sequence[float]) -> list[float]:
    return np.quantile(values, (0.025, 0.975)).round(3).tolist()


def correlations(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Nested dict of correlations, with the keys "SCENARIO, VIEW", then source, then quantity."""
    results: dict[str, Any] = {}
    for scenario in dict.fromkeys(name.rpartition("-")[0] for name in runs):
        measured = [run["rows"] for name, run in runs.items() if name.startswith(f"{scenario}-")]
        for view in VIEWS:
            by_source: dict[str, Any] = {source: {} for source in SOURCES}
            for source, quantity in itertools.product(SOURCES, QUANTITIES):
                smooth = view == "averaged"
                pairs = [_with_reference(rows, source, quantity, smooth) for rows in measured]
                by_source[source][quantity] = compare(pairs)
            results[f"{scenario}, {view}"] = by_source
    return results


def costs(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Extra CPU time of a measured step in percent of a plain one: median and 95% interval.

    Empty for runs that are too short for such a measurement.
    """
    rows = [row for run in runs.values() for row in run["costs"] if math.isfinite(row["rest"])]
    if not rows:
        return {}
    extra = np.array([(r["gradients"] - r["plain"]) / (r["rest"] + r["plain"]) for r in rows])
    rng = np.random.default_rng(0)
    medians = np.median(extra[rng.integers(len(extra), size=(RESAMPLES, len(extra)))], 1)
    ends = (100 * np.quantile(medians, (0.025, 0.975))).round(2).tolist()
    return {"gradients": {"percent": round(100 * float(np.median(extra)), 2), "ci95": ends}}


# ---- the page


def page_tables() -> str:
    """The Markdown below the marker in research/signals.md, from the stored results."""
    titles = {"On a pretrained model": REAL_RESULTS, "On the demo's task": RESULTS}
    return "\n".join(
        f"## {title}\n\n{tables(json.loads(path.read_text()))}"
        for title, path in titles.items()
        if path.exists()
    )


def tables(study: dict[str, Any]) -> str:
    """The tables of one study, as Markdown."""
    parts = [f"{study['setting']['words']}\n"]
    rows: list[list[str]] = []
    for title, by_source in study["correlations"].items():
        scenario, view = title.split(", ")
        name = f"`{scenario}`, {VIEWS[view]}"
        rows += [
            [name, source, *(_cell(cells[q]) for q in QUANTITIES)]
            for source, cells in by_source.items()
        ]
        control = [_cell(by_source["proxy"][q], "shuffled", "shuffled95") for q in QUANTITIES]
        rows.append([name, "steps shuffled", *control])
    for source, claims in PAPER.items():
        cells = [f"{claims[q]:.2f}" if q in claims else "-" for q in QUANTITIES]
        rows.append(["the paper's claim", source, *cells])
    head = ("runs", "source", *(f"`{name}`" for name in QUANTITIES))
    parts.append(f"{markdown_table(head, rows)}\n")
    for name, cost in study["cost"].items():
        low, high = cost["ci95"]
        parts.append(
            f"A step that also measures the {name} of all parts takes {cost['percent']:.0f}% "
            f"[{low:.0f}, {high:.0f}] longer.\n"
        )
    return "\n".join(parts)


def _cell(result: dict[str, Any] | None, mean: str = "mean", ends: str = "ci95") -> str:
    """Format a correlation and its interval."""
    if result is None:
        return "-"
    low, high = result[ends]
    return f"{result[mean]:.2f} [{low:.2f}, {high:.2f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing runs and write the results and the page; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m research.validate_signals", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("runs/signals"), help="run folder")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs per scenario")
    parser.add_argument("--model", help="a pretrained model, instead of the demo's")
    parser.add_argument("--config", type=Path, help="of `gac train`, instead of the demo's task")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other keys")
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command, every, parts = "python -m research.validate_signals", EVERY, PARTS
    if args.config is not None:
        find_user_code(args.config)
        plain, changes = {args.config.stem: read_study(args.config)[0]}, args.set
        command += f" --config {args.config.name}"
    elif args.model is not None:
        scenarios = real_scenarios(args.out / "real", args.model, REAL_STEPS)
        plain = {name: dump(config) for name, config in scenarios.items()}
        changes, every, parts = [*LARGER, *args.set], 1, REAL_PARTS
        command += " --model DIR"
    else:
        scenarios = write_scenarios(args.out / "scenarios", steps=STEPS)
        plain = {name: dump(scenarios[name]) for name in SCENARIOS}
        changes = [*SMALLER, *args.set]
    method = Arm("mu", {"name": "constant", "mu": 0.5})
    runs = {}
    for seed in range(args.seeds):
        for name, data in plain.items():
            own = [*changes, f"out={args.out / name}", "eval.every=0", "export=false"]
            runs[f"{name}-{seed}"] = run(arm_config(data, method, seed, own), every, parts)
            print(f"{name}, seed {seed}: {len(runs[f'{name}-{seed}']['rows'])} measurements")
    steps = arm_config(next(iter(plain.values())), method, 0, changes).steps
    study = {
        "setting": {
            "seeds": args.seeds,
            "steps": steps,
            "every": every,
            "changes": changes,
            "parts": parts,
            "decay": DECAY,
            **origin(),
            "words": f"Written by `{command} --seeds {args.seeds}`: {steps} steps at mu = 0.5, "
            f"measured at {'each' if every == 1 else f'one of {every}'}; seeds: {args.seeds}.",
        },
        "correlations": correlations(runs),
        "cost": costs(runs),
        "runs": runs,
    }
    if args.config is not None:
        (args.out / "signals.json").write_text(json.dumps(study) + "\n")
        print(tables(study))
        return 0
    results = RESULTS if args.model is None else REAL_RESULTS
    results.write_text(json.dumps(study) + "\n")
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + "\n" + page_tables())
    print(f"wrote {results} and {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
