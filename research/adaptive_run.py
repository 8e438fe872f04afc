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
from collections.abc import Iterator, Mapping, Sequence
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
    LENGTH,
    STEPS,
    TEMPLATE,
    held_out,
    noise_of,
    path,
    regimes,
    rows,
    texts,
)

RESULTS = Path(__file__).resolve().parent / "results" / "adaptive"
SEEDS = range(8)
EVALUATED = 500
MUS = (0.02, 0.5, 0.98)
SCHEDULES = {f"{first}-{second}": (first, second) for first in MUS for second in MUS}
"""Name -> mu of the first and of the second regime; the diagonal are the constants."""
CONSTANTS = tuple(f"{mu}-{mu}" for mu in MUS)
LESS, MORE = ("0.5-0.02", "0.98-0.02"), ("0.02-0.5", "0.02-0.98")
ORACLES = {
    "bad-demonstrations": LESS,
    "noisy-rewards": MORE,
    "stationary": LESS,
    "partly-random-rewards": MORE,
}
"""Cell -> the schedules that know its regimes and turn to the better signal in the second."""
ROLLOUTS = {
    "num_prompts": 8,
    "num_generations": 4,
    "max_completion_length": LENGTH,
    "function": "research.adaptive_model:sample",
    "correction": "none",
}
DEMOS = 8
LR = 1e-3
FIRST = 26
"""The first layer with adapters; the layers before it need no backward pass."""
LORA = {"rank": 16, "alpha": 32, "target_modules": r".*layers\.(2[6-9])\..*_proj"}
REWARD = "research.adaptive_task:SumReward"

ADAPTIVE: dict[str, dict[str, Any]] = {
    "constant-alarm": {
        "name": "constant-alarm",
        "mu": 0.5,
        "alarm": {"warmup": 4, "decay": 0.5, "slack": 1.0, "threshold": 1.5},
    },
    "gac": {
        "name": "gac",
        "weight": "one",
        "update_every": 1,
        "ema_decay": 0.5,
        "signal_decay": 0.5,
        "kl_decay": 0.5,
        "max_step": 0.15,
        "kl_target": 0.3,
    },
    "gac-paper": {"name": "gac-paper", "weight": "one"},
}
"""The adaptive arms: their method and what differs from its defaults."""
SINGLE: dict[str, dict[str, Any]] = {"sft": {"name": "sft"}, "grpo": {"name": "grpo"}}
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
        results: folder of the raw rows.
        changes: keys of `TrainConfig` that replace those of the study, for tests and pilots.
        evaluated: number of held-out problems.
        steps: optimizer steps of a run.
        first: the first layer with adapters.
    """

    def __init__(
        self,
        model: str,
        results: Path = RESULTS,
        changes: Mapping[str, Any] | None = None,
        evaluated: int = EVALUATED,
        steps: int = STEPS,
        first: int = FIRST,
    ) -> None:
        self.model, self.results, self.changes = model, results, dict(changes or {})
        self.problems, self.steps = held_out(evaluated), steps
        self.commit = commit()
        self.first = first
        self.loaded: Any = None
        self.tokenizer: Any = None
        self.initial: dict[str, torch.Tensor] = {}

    def method(self, run: Run) -> Mapping[str, Any]:
        """The method of a run; that of a yoked control needs the finished run it copies."""
        if run.arm in SCHEDULES:
            return path(*SCHEDULES[run.arm], regimes(run.cell, run.seed, self.steps))
        if run.arm.startswith("yoked-"):
            arm = run.arm.removeprefix("yoked-")
            donor = Run(DONORS[run.cell], arm, run.seed)
            values = next(row["mu"] for row in finished(self.results) if key(row) == donor)
            return {"name": "research.adaptive_task:MuPath", "values": values}
        return (ADAPTIVE | SINGLE | {"chord-mu": CHORD})[run.arm]

    def config(self, run: Run, folder: Path) -> TrainConfig:
        """Write the data of a run to `folder`; returns its configuration."""
        second = regimes(run.cell, run.seed, self.steps)
        wrong = [run.cell == "bad-demonstrations" and is_second for is_second in second]
        excluded = {row["prompt"] for row in self.problems}
        for kind, count in (("prompts", ROLLOUTS["num_prompts"]), ("demos", DEMOS)):
            write_rows(folder / f"{kind}.jsonl", rows(kind, run.seed, count, wrong, excluded))
        noise = {"noise": noise_of(run.cell, second), "seed": run.seed}
        settings = {
            "out": str(folder / "run"),
            "run_name": run.arm,
            "model": {"path": self.model, "dtype": "bfloat16", "lora": LORA},
            "method": self.method(run),
            "data": data(folder) | {"order": "research.adaptive_task:InOrder"},
            "reward": {"name": REWARD, **noise},
            "rollouts": {**ROLLOUTS, "log_samples_every": 0},
            "demo_batch_size": DEMOS,
            "steps": self.steps,
            "optim": {"lr": LR, "warmup_steps": 2, "schedule": "constant", "betas": [0.9, 0.99]},
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
            config = load(DataConfig, {**data(Path(name)), "prompts": None})
            rows = [demo_row(example) for example in load_demos(config, self.tokenizer)]
        return greedy_matches(self.loaded, rows, LENGTH)


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


def data(folder: Path) -> dict[str, Any]:
    """The keys of `data` for the rows in `folder`."""
    files = {kind: str(folder / f"{kind}.jsonl") for kind in ("prompts", "demos")}
    return {**files, "template": TEMPLATE}


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
}
"""Cell -> the cell whose run gives a yoked control its path of mu."""
YOKED = ("gac", "constant-alarm")
"""Arms with a yoked control."""


def plan() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(cell, arms) in the order of execution; all seeds of one entry run before the next."""
    first, second, *others = CELLS
    yield first, (*CONSTANTS[1:], "gac")
    yield first, CONSTANTS[:1]
    yield first, (ORACLES[first][1],)
    yield second, ("gac",)
    yield first, ("yoked-gac",)
    yield first, ("constant-alarm",)
    yield second, (*CONSTANTS, ORACLES[second][1], "yoked-gac")
    yield second, ("constant-alarm", "gac-paper", ORACLES[second][0])
    yield first, ("yoked-constant-alarm", "gac-paper", ORACLES[first][0])
    yield second, ("yoked-constant-alarm",)
    yield first, tuple(SINGLE)
    yield second, tuple(SINGLE)
    for cell in others:
        yield cell, (*CONSTANTS, *ORACLES[cell], *ADAPTIVE)
        yield cell, tuple(f"yoked-{arm}" for arm in YOKED)


def runs(seeds: Sequence[int] = SEEDS) -> Iterator[Run]:
    """All runs in order: within an entry of the plan seed by seed, the arms in changing order."""
    for cell, arms in plan():
        for seed in seeds:
            shuffled = random.Random(f"{cell}/{seed}").sample(arms, len(arms))
            yield from (Run(cell, arm, seed) for arm in shuffled)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run what has no row yet; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.adaptive_run", description=__doc__)
    parser.add_argument("--model", required=True, help="folder that tools.real_model wrote")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/adaptive"), help="for its reduced copy"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw rows")
    parser.add_argument("--hours", type=float, default=24.0, help="start no run after that time")
    parser.add_argument("--figures", type=Path, help="only draw one run per arm, in a new folder")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    end = time.monotonic() + 3600 * args.hours
    if not (args.out / "tokenizer_config.json").exists():  # the last file written
        reduce_vocabulary(args.model, args.out, texts())
    study = Study(str(args.out), args.results)
    if args.figures is not None:
        print(draw(study, args.figures))
    else:
        execute_all(study, runs(), end)
    return 0


def draw(study: Study, folder: Path) -> Path:
    """Write the report of one run of each of `DRAWN`, with the panels of the paper's figures."""
    for arm in DRAWN:
        own = folder / arm
        own.mkdir(parents=True)
        with study.loaded_once():
            QuietTrainer(study.config(Run("noisy-rewards", arm, FIGURE_SEED), own)).run()
    return write_report([folder / arm / "run" for arm in DRAWN], folder)


def execute_all(study: Study, todo: Iterator[Run], end: float) -> None:
    """Execute the runs that have no row yet, and append one row for each, until the time `end`."""
    done = {key(row) for row in finished(study.results)}
    study.results.mkdir(parents=True, exist_ok=True)
    log = Logbook(study.results / "runs.jsonl")
    for run in todo:
        if run in done:
            continue
        if time.monotonic() > end:
            break
        log.append(study.execute(run))


if __name__ == "__main__":
    sys.exit(main())
