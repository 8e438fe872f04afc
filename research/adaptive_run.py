"""Runs the study of adaptive mu: `python -m research.adaptive_run --model DIR`.

Its protocol is in research/adaptive.md. All runs take place in one process; each appends one line
to research/results/adaptive/runs.jsonl. Rerun an interrupted command to continue: a run that was
cut off is repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gac.config import load
from gac.data import DataConfig, load_demos
from gac.data.micro_batches import demo_row
from gac.demo.task import write_rows
from gac.models.config import ModelConfig
from gac.report import write_report
from gac.train_config import TrainConfig
from gac.training import policy, trainer
from gac.training.record import Logbook
from gac.training.trainer import Trainer
from research.adaptive_model import greedy_matches, reduce_vocabulary, share_frozen
from research.adaptive_task import (
    CELLS,
    CODE,
    SUMS,
    Task,
    held_out,
    noise_of,
    path,
    regimes,
    rows,
)

RESULTS = Path(__file__).resolve().parent / "results" / "adaptive"
SEEDS = range(8)
LAYERS = 30
"""Of the pretrained model."""
TASKS = {"sums": SUMS, "code": CODE}


def schedules(mus: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Name -> mu of the first and of the second regime."""
    return {f"{first}-{second}": (first, second) for first in mus for second in mus}


SCHEDULES = {task: schedules(task.mus) for task in TASKS.values()}


def constants(cell: str) -> tuple[str, ...]:
    """The schedules of a cell with one mu."""
    return tuple(f"{mu}-{mu}" for mu in CELLS[cell].task.mus)


def oracles(cell: str) -> tuple[str, str]:
    """The schedules that know a cell's regimes: between the lowest mu and 0.5, and the highest."""
    low, *_, high = CELLS[cell].task.mus
    if CELLS[cell].less:
        return f"0.5-{low}", f"{high}-{low}"
    return f"{low}-0.5", f"{low}-{high}"


ROLLOUTS = {
    "num_prompts": 8,
    "num_generations": 4,
    "function": "research.adaptive_model:sample",
    "correction": "none",
    "log_samples_every": 0,
}
OPTIM = {"warmup_steps": 2, "schedule": "constant", "betas": [0.9, 0.99]}
LORA = {"rank": 16, "alpha": 32}
REWARD = "research.adaptive_task:AnswerReward"

FAST = {"update_every": 1, "ema_decay": 0.5, "signal_decay": 0.5, "kl_decay": 0.5, "max_step": 0.15}
"""Settings of `gac` for runs of some tens of steps."""
FASTEST = {
    "name": "gac",
    "weight": "one",
    "update_every": 1,
    "signal_decay": 0.0,
    "ema": "none",
    "max_step": 1.0,
    "prior_blend": 1.0,
    "alpha_init": 0.15,
    "kl_up": 0.0,
    "kl_down": 0.0,
}
"""`gac` without a prior, averages, a limit per step or a KL loop: it follows its signals."""
ALARM = {"warmup": 4, "decay": 0.5, "slack": 1.0, "threshold": 1.5}
ADAPTIVE: dict[Task, dict[str, dict[str, Any]]] = {
    SUMS: {
        "constant-alarm": {"name": "constant-alarm", "mu": 0.5, "alarm": ALARM},
        "gac": {"name": "gac", "weight": "one", **FAST, "kl_target": 0.3},
        "gac-paper": {"name": "gac-paper", "weight": "one"},
    },
    CODE: {
        "constant-alarm": {
            "name": "constant-alarm",
            "mu": 0.98,
            "alarm": ALARM | {"slack": 0.5, "threshold": 0.6},
        },
        "gac-fast": FASTEST,
        "gac": {"name": "gac", "weight": "one", **FAST, "kl_target": 0.3, "kl_sign": -1},
        "gac-paper": {"name": "gac-paper", "weight": "one"},
    },
}
"""The adaptive arms: their method and what differs from its defaults."""
SINGLE: dict[str, Mapping[str, Any]] = {"sft": {"name": "sft"}, "grpo": {"name": "grpo"}}
SEQUENCE = {"name": "sft-then-rl", "sft_steps": 14, "mu": 0.0}
"""SFT to the earliest step at which the demonstrations of the code turn bad, then RL."""
CHORD = {"name": "chord-mu", "schedule": {"peak": 0.9, "valley": 0.05, "decay": 7}}
"""CHORD's schedule over 60% of the run; only in the figures."""
DRAWN = ("gac", "gac-paper", "0.5-0.5", "chord-mu")
"""Arms of the figures."""


FIGURE_SEED = 200


class Run(NamedTuple):
    """One run of the study."""

    cell: str
    arm: str
    seed: int


def finished(results: Path) -> list[dict[str, Any]]:
    """The rows of the finished runs; a line that a kill cut off is left out."""
    file, found = results / "runs.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


class QuietTrainer(Trainer):
    """A trainer that writes no checkpoints: a run that is cut off is repeated."""

    def save(self) -> None:
        """Write nothing."""


class Study:
    """The runs of the study with one model.

    Args:
        model: folder of the pretrained model.
        task: what it learns.
        results: folder of the raw rows.
        changes: keys of `TrainConfig` that replace those of the study, for tests and pilots.
        evaluated, steps, first: replace those of the task; None: the task's.
    """

    def __init__(
        self,
        model: str,
        task: Task,
        results: Path = RESULTS,
        changes: Mapping[str, Any] | None = None,
        evaluated: int | None = None,
        steps: int | None = None,
        first: int | None = None,
    ) -> None:
        self.model, self.task, self.results = model, task, results
        self.changes, self.steps = dict(changes or {}), steps or task.steps
        self.problems = held_out(task, evaluated or task.evaluated)
        self.commit = commit()
        self.first = first or task.first
        self.loaded: Any = None
        self.tokenizer: Any = None
        self.initial: dict[str, torch.Tensor] = {}

    def method(self, run: Run) -> Mapping[str, Any]:
        """The method of a run; that of a yoked control needs the finished run it copies."""
        named = SCHEDULES[self.task]
        if run.arm in named:
            return path(*named[run.arm], regimes(run.cell, run.seed, self.steps))
        if run.arm.startswith("yoked-"):
            arm = run.arm.removeprefix("yoked-")
            donor = Run(DONORS[run.cell], arm, run.seed)
            values = next(row["mu"] for row in finished(self.results) if key(row) == donor)
            return {"name": "research.adaptive_task:MuPath", "values": values}
        return (ADAPTIVE[self.task] | SINGLE | {"chord-mu": CHORD, "sft-then-rl": SEQUENCE})[
            run.arm
        ]

    def config(self, run: Run, folder: Path) -> TrainConfig:
        """Write the data of a run to `folder`; returns its configuration."""
        second = regimes(run.cell, run.seed, self.steps)
        bad = [CELLS[run.cell].bad and is_second for is_second in second]
        excluded = {row["prompt"] for row in self.problems}
        for kind, count in (("prompts", ROLLOUTS["num_prompts"]), ("demos", self.task.demos)):
            written = rows(self.task, kind, run.seed, count, bad, excluded)
            write_rows(folder / f"{kind}.jsonl", written)
        noise = {"noise": noise_of(run.cell, second), "seed": run.seed}
        trained = "|".join(map(str, range(self.first, LAYERS)))
        lora = LORA | {"target_modules": rf".*layers\.({trained})\..*_proj"}
        settings = {
            "out": str(folder / "run"),
            "run_name": run.arm,
            "model": {"path": self.model, "dtype": "bfloat16", "lora": lora},
            "method": self.method(run),
            "data": self.data(folder) | {"order": "research.adaptive_task:InOrder"},
            "reward": {"name": REWARD, **noise},
            "rollouts": {**ROLLOUTS, "max_completion_length": self.task.length},
            "demo_batch_size": self.task.demos,
            "steps": self.steps,
            "optim": OPTIM | {"lr": self.task.lr},
            "micro_batch_size": 1000,
            "checkpoint_every": 10**6,
            "export": False,
            "seed": run.seed,
        }
        return load(TrainConfig, settings | self.changes)

    def execute(self, run: Run) -> dict[str, Any]:
        """Train and evaluate; returns the raw row of the run."""
        started, cpu = time.perf_counter(), time.process_time()
        with self.loaded_once(), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with contextlib.redirect_stderr(io.StringIO()):
                QuietTrainer(self.config(run, folder)).run()
            lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
            trained = time.process_time() - cpu
            correct = self.correct()
        steps = [json.loads(line) for line in lines]
        return {
            **run._asdict(),
            "accuracy": sum(correct) / len(correct),
            "second": [int(is_second) for is_second in regimes(run.cell, run.seed, self.steps)],
            **{name: [_short(step.get(name)) for step in steps] for name in COLUMNS},
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "training_cpu_seconds": round(trained, 2),
            "seconds": round(time.perf_counter() - started, 2),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
        }

    @contextlib.contextmanager
    def loaded_once(self) -> Iterator[None]:
        """Let trainers share the model and the tokenizer; each starts from the initial adapters."""

        def make(*args: Any, **keywords: Any) -> Any:
            if self.loaded is None:
                self.loaded = make_model(*args, **keywords)
                share_frozen(self.loaded, self.first)
                self.initial = {n: p.detach().clone() for n, p in self._adapters()}
            for name, weight in self._adapters():
                weight.data.copy_(self.initial[name])
            return self.loaded

        make_model, load_tokenizer = policy.make_model, trainer.load_tokenizer
        tokenizer = self.tokenizer
        if tokenizer is None:
            tokenizer = self.tokenizer = load_tokenizer(load(ModelConfig, {"path": self.model}))
        policy.make_model, trainer.load_tokenizer = make, lambda _: tokenizer
        try:
            yield
        finally:
            policy.make_model, trainer.load_tokenizer = make_model, load_tokenizer

    def _adapters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, weight in self.loaded.named_parameters():
            if weight.requires_grad:
                yield name, weight

    def correct(self) -> list[bool]:
        """Whether the greedy answer to each held-out problem is right."""
        with tempfile.TemporaryDirectory() as name:
            write_rows(Path(name) / "demos.jsonl", self.problems)
            config = load(DataConfig, {**self.data(Path(name)), "prompts": None})
            rows = [demo_row(example) for example in load_demos(config, self.tokenizer)]
        return greedy_matches(self.loaded, rows, self.task.length)

    def data(self, folder: Path) -> dict[str, Any]:
        """The keys of `data` for the rows in `folder`."""
        files = {kind: str(folder / f"{kind}.jsonl") for kind in ("prompts", "demos")}
        return {**files, "template": self.task.template}


COLUMNS = (
    "mu",
    "mu_star",
    "prior",
    "alpha",
    "kl",
    "sft_variance",
    "rl_variance",
    "disagreement",
    "demo_loss",
    "reward_mean",
    "entropy",
    "grad_norm",
    "demos_suspect",
)
"""Metrics of each step that a raw row keeps."""


def key(row: Mapping[str, Any]) -> Run:
    """The run of a raw row."""
    return Run(*(row[name] for name in Run._fields))


def _short(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def commit() -> str:
    """The short hash of the checkout's commit."""
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip()


DONORS = {
    "bad-demonstrations": "noisy-rewards",
    "noisy-rewards": "bad-demonstrations",
    "stationary": "bad-demonstrations",
    "partly-random-rewards": "noisy-rewards",
    "code-bad-demonstrations": "code-stationary",
}
"""Cell -> the cell whose run gives a yoked control its path of mu."""
YOKED = ("gac", "constant-alarm")
"""Arms of the sums with a yoked control."""


def plan_sums() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(cell, arms) in the order of execution; all seeds of one entry run before the next."""
    first, second, *others = (cell for cell in CELLS if CELLS[cell].task is SUMS)
    low, *higher = constants(first)
    yield first, (*higher, "gac")
    yield first, (low,)
    yield first, (oracles(first)[1],)
    yield second, ("gac",)
    yield first, ("yoked-gac",)
    yield first, ("constant-alarm",)
    yield second, (*constants(second), oracles(second)[1], "yoked-gac")
    yield second, ("constant-alarm", "gac-paper", oracles(second)[0])
    yield first, ("yoked-constant-alarm", "gac-paper", oracles(first)[0])
    yield second, ("yoked-constant-alarm",)
    yield first, tuple(SINGLE)
    yield second, tuple(SINGLE)
    for cell in others:
        yield cell, (*constants(cell), *oracles(cell), *ADAPTIVE[SUMS])
        yield cell, tuple(f"yoked-{arm}" for arm in YOKED)


def plan_code() -> Iterator[tuple[str, tuple[str, ...]]]:
    """As `plan_sums`."""
    cell, still = "code-bad-demonstrations", "code-stationary"
    lowest, low, middle, high = constants(cell)
    yield cell, (oracles(cell)[1], low, "gac-fast", "constant-alarm")
    yield cell, (lowest,)
    yield still, ("constant-alarm",)
    yield cell, ("yoked-constant-alarm",)
    yield still, ("gac-fast",)
    yield cell, ("yoked-gac-fast",)
    yield cell, (middle,)
    yield cell, ("gac", "sft-then-rl")
    yield cell, (high, oracles(cell)[0], "gac-paper", *SINGLE)


PLANS = {SUMS: plan_sums, CODE: plan_code}


def runs(task: Task, seeds: Sequence[int] = SEEDS) -> Iterator[Run]:
    """All runs in order: within an entry of the plan seed by seed, the arms in changing order."""
    for cell, arms in PLANS[task]():
        for seed in seeds:
            shuffled = random.Random(f"{cell}/{seed}").sample(arms, len(arms))
            yield from (Run(cell, arm, seed) for arm in shuffled)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run what has no row yet; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.adaptive_run", description=__doc__)
    parser.add_argument("--model", required=True, help="folder that tools.real_model wrote")
    parser.add_argument("--task", choices=TASKS, default="code", help="what the model learns")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/adaptive"), help="for its reduced copy"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="only these seeds")
    parser.add_argument("--hours", type=float, default=24.0, help="start no run after that time")
    parser.add_argument("--figures", type=Path, help="only draw one run per arm, in a new folder")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    end = time.monotonic() + 3600 * args.hours
    task, folder = TASKS[args.task], args.out / args.task
    if not (folder / "tokenizer_config.json").exists():  # the last file written
        reduce_vocabulary(args.model, folder, task.texts())
    study = Study(str(folder), task, args.results)
    if args.figures is not None:
        print(draw(study, args.figures))
    else:
        execute_all(study.execute, runs(task, args.seeds), study.results, end)
    return 0


def draw(study: Study, folder: Path) -> Path:
    """Write the report of one run of each of `DRAWN`, with the panels of the paper's figures."""
    for arm in DRAWN:
        own = folder / arm
        own.mkdir(parents=True)
        with study.loaded_once():
            QuietTrainer(study.config(Run("noisy-rewards", arm, FIGURE_SEED), own)).run()
    return write_report([folder / arm / "run" for arm in DRAWN], folder)


def execute_all(
    execute: Callable[[Any], dict[str, Any]], todo: Iterator[Any], results: Path, end: float
) -> None:
    """Execute the runs that have no row in `results` yet, until the time `end`.

    execute: returns the raw row of a run, which is appended; it has the run's fields. todo: named
    tuples.
    """
    rows = finished(results)
    results.mkdir(parents=True, exist_ok=True)
    log = Logbook(results / "runs.jsonl")
    for run in todo:
        if any(tuple(row[name] for name in run._fields) == run for row in rows):
            continue
        if time.monotonic() > end:
            break
        log.append(execute(run))


if __name__ == "__main__":
    sys.exit(main())
