"""Runs the fifth study: `python -m research.study_run {tuning,final,confirmation,turns} --out X`.

Its protocol is in research/study.md. Trains the cells of a grid in one process, in order of
importance; each result is one line of research/results/study/*.jsonl. Rerun an interrupted command
to continue. The folder X holds the base models, which are trained once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import logging
import random
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GPT2Config

from gac.config import load
from gac.demo.run import demo_fields
from gac.demo.task import make_tokenizer, write_rows
from gac.errors import ConfigError
from gac.faults import checkpoint
from gac.methods import METHODS
from gac.order import Order
from gac.train_config import TrainConfig
from gac.training.export import export_checkpoint
from gac.training.trainer import train
from research.study_tasks import ALPHABET, TASKS, TOOL, Problem, corrupt, in_turns, restyle

RESULTS = Path(__file__).resolve().parent / "results" / "study"
STEPS = 48
COMPLETIONS = 6
ROWS = 48
"""Rows per optimizer step: demonstrations plus rollouts."""
CHANGE = 0.4
"""Share of the run after which the demonstrations of `good-then-bad` are wrong."""
WRONG = 0.5
"""Share of wrong demonstrations in `partly-wrong`."""
LR = 1e-3
EVALUATED = 200
BASES = {"weak": 0.15, "mid": 0.45}
"""Base model -> accuracy at which its training stops."""
BASE_NOISE, BASE_STEPS, BASE_ROWS = 0.1, 1500, 20_000
CONDITIONS = ("good", "partly-wrong", "good-then-bad", "other-style")
SEEDS = range(5)
TUNING_SEED = 100
KINDS = TASKS | TOOL
FUNCTION = "research.study_tasks:play"


class Arm(NamedTuple):
    """A method with its settings, and how a step's rows are divided."""

    method: dict[str, Any]
    """`name` and fields of the method."""
    demos: int = 12
    """Demonstrations per step from the separate set."""
    prompts: int = 6
    """Prompts per step, with `COMPLETIONS` rollouts each."""
    lr: float = LR
    """Peak learning rate."""
    steps: int = STEPS
    """Optimizer steps."""
    sources: bool = False
    """Whether the data name the source of each demonstration."""


def separate(name: str, lr: float = LR, **fields: Any) -> Arm:
    """12 demonstrations of the separate set and 36 rollouts per step."""
    return Arm({"name": name, **demo_fields(name, STEPS), **fields}, lr=lr)


def of_prompts(name: str, lr: float = LR, **fields: Any) -> Arm:
    """48 rollouts per step, and the demonstrations of their prompts."""
    return Arm({"name": name, **demo_fields(name, STEPS), **fields}, 0, ROWS // COMPLETIONS, lr)


def in_phases(sft_steps: int, lr: float = LR) -> Arm:
    """48 demonstrations per step, then 48 rollouts per step."""
    method = {"name": "sft-then-rl", "sft_steps": sft_steps}
    return Arm(method, ROWS, ROWS // COMPLETIONS, lr)


def warmed_up(sft_steps: int, lr: float = LR) -> Arm:
    """12 demonstrations per step, then 36 rollouts more; as many rows in all as the other arms."""
    method = {"name": "sft-then-rl", "sft_steps": sft_steps, "mu": 0.4}
    return Arm(method, lr=lr, steps=STEPS + sft_steps * 3 // 4)


LRS = (5e-4, 1e-3, 2e-3)
DECAY = {"peak": 0.9, "valley": 0.05}
CANDIDATES: dict[str, tuple[Arm, ...]] = {
    "sft": tuple(Arm({"name": "sft"}, ROWS, 0, 2 * lr) for lr in LRS),
    "grpo": tuple(Arm({"name": "grpo"}, 0, ROWS // COMPLETIONS, lr / 2) for lr in LRS),
    "mu-0.4": tuple(separate("constant", lr, mu=0.4) for lr in LRS),
    "sft-then-rl": tuple(in_phases(n) for n in (12, 24, 36)),
    "warm-up-then-mu-0.4": tuple(warmed_up(n) for n in (8, 16, 32)),
    "routing": tuple(of_prompts("routing", lr) for lr in LRS),
    "superrl": tuple(of_prompts("superrl", lr) for lr in LRS),
    "chord-mu": tuple(
        separate("chord-mu", schedule={"peak": peak, "valley": 0.05, "decay": decay})
        for peak, decay in ((0.9, 29), (0.9, 48), (0.5, 29))
    ),
    "hpt": tuple(of_prompts("hpt", sft_coef=coef) for coef in (0.3, 1.0, 3.0)),
    "prefix-rft": tuple(
        of_prompts("prefix-rft", low={"peak": peak, "valley": 0.05, "decay": 48}, top=top)
        for peak, top in ((0.95, 0.2), (0.95, 1.0), (0.5, 1.0))
    ),
}
"""Three settings of each tuned arm, of which the tuning runs choose one."""
TUNING_CELLS = tuple(
    zip(
        tuple(TASKS) * 2,
        ("weak",) * 5 + ("mid",) * 5,
        CONDITIONS * 2 + CONDITIONS[::2],
        strict=True,
    )
)
"""(task, base, condition) of the tuning runs: each task once with each base."""

FIXED = {
    "constant-alarm": separate("constant-alarm"),
    "named-sources": separate("constant-alarm")._replace(sources=True),
    **{f"mu-{mu}": separate("constant", mu=mu) for mu in (0.1, 0.2, 0.6, 0.8)},
    "gac-paper": separate("gac-paper"),
}
"""Arms that are not tuned here."""
MAIN = ("sft", "grpo", "sft-then-rl", "mu-0.4", "constant-alarm", "routing")
FURTHER = ("superrl", "chord-mu", "warm-up-then-mu-0.4", "mu-0.1", "mu-0.2", "mu-0.6", "mu-0.8")
LAST = ("named-sources", "gac-paper", "hpt", "prefix-rft")
PHASES = (
    ("mid", MAIN),
    ("weak", MAIN),
    ("mid", FURTHER),
    ("weak", FURTHER),
    ("mid", LAST),
    ("weak", LAST),
)
"""(base, arms) in the order of execution."""
CONFIRMED: dict[str, tuple[str, dict[str, Any]]] = {
    "constant-alarm": ("constant-alarm", {}),
    "constant-alarm-phi": ("constant-alarm", {"weight": "phi"}),
    "gac-paper": ("gac-paper", {}),
    "gac-paper-one": ("gac-paper", {"weight": "one"}),
    "sft-then-rl": ("sft-then-rl", {}),
    "sft-then-rl-phi": ("sft-then-rl", {"weight": "phi"}),
}
"""Arm of the confirmation -> arm of the study, and what differs in its method."""
CONFIRMATION_SEEDS = range(10, 15)
TURNS = ("sft", "grpo", "sft-then-rl", "mu-0.4", "constant-alarm", "gac-paper", "routing")
"""Arms of the continuation with two turns."""


class Cell(NamedTuple):
    """One run of the grid."""

    task: str
    base: str
    condition: str
    arm: str
    seed: int


def demonstration(
    condition: str, problem: Problem, share: float, rng: random.Random
) -> dict[str, Any]:
    """The demonstration at `share` of the run, and the name of its source."""
    bad = (condition == "partly-wrong" and rng.random() < WRONG) or (
        condition == "good-then-bad" and share >= CHANGE
    )
    text = corrupt(problem.solution, rng) if bad else problem.solution
    text = restyle(text) if condition == "other-style" else text
    return {"solution": in_turns(text, problem), "source": "second" if bad else "first"}


def write_data(
    path: Path, cell: Cell, per_step: int, steps: int, order_seed: int, kind: str
) -> None:
    """Write `steps * per_step` problems so that a run visits them in the order of generation.

    The trainer visits the rows in a permutation that depends only on their number and the seed, so
    the k-th problem goes where the permutation looks k-th. All problems are visited once.
    """
    rng = random.Random(f"{cell.task}/{cell.condition}/{cell.seed}/{kind}")
    visited = Order(per_step * steps, order_seed).take(per_step * steps)
    rows: list[dict[str, Any]] = [{}] * len(visited)
    for k, row in enumerate(visited):
        problem = KINDS[cell.task].problem(rng)
        demo = demonstration(cell.condition, problem, k / len(visited), rng)
        rows[row] = _row(cell.task, k, problem) | demo
    write_rows(path, rows)


def _row(task: str, index: int, problem: Problem) -> dict[str, Any]:
    known = {"prompt": problem.prompt, "answer": problem.solution, "table": problem.table}
    return {"id": f"{index}", **known, "task": task}


def config(out: Path, run: Path, changes: Mapping[str, Any], task: str) -> TrainConfig:
    """The settings that all runs share, with `changes`."""
    evaluation = {
        "data": {"prompts": str(out / f"{task}-eval.jsonl")},
        "max_completion_length": KINDS[task].response_tokens + 1,
        "batch": None,
        "function": FUNCTION if KINDS[task].turns else None,
    }
    shared = {
        "out": str(run),
        "reward": "research.study_tasks:reward",
        "micro_batch_size": 1000,
        "export": False,
        "checkpoint_every": 10**6,
        "eval": evaluation | changes.get("eval", {}),
    }
    return load(TrainConfig, shared | {k: v for k, v in changes.items() if k != "eval"})


def make_bases(out: Path, task: str) -> None:
    """Train the task's base models by SFT on noisy solutions, unless they exist."""
    if all((out / f"{task}-{base}" / "config.json").exists() for base in BASES):
        return
    rng = random.Random(f"{task}/base")
    problems = [KINDS[task].problem(rng) for _ in range(BASE_ROWS)]
    rows = [
        {**_row(task, i, p), "solution": in_turns(corrupt(p.solution, rng, BASE_NOISE), p)}
        for i, p in enumerate(problems)
    ]
    write_rows(out / f"{task}-base.jsonl", rows)
    write_rows(
        out / f"{task}-eval.jsonl",
        [_row(task, i, KINDS[task].problem(rng)) for i in range(EVALUATED)],
    )
    init, run = out / f"{task}-init", out / f"{task}-run"
    tokenizer = make_tokenizer(ALPHABET)
    tokenizer.save_pretrained(init)
    GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=48,
        n_inner=192,
        n_layer=2,
        n_head=4,
        n_positions=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    ).save_pretrained(init)
    changes = {
        "model": {"path": str(init), "random_init": True},
        "data": {"demos": str(out / f"{task}-base.jsonl")},
        "method": {"name": "sft"},
        "optim": {"lr": 3e-3, "warmup_steps": 20, "schedule": "constant"},
        "demo_batch_size": 64,
        "checkpoint_every": 5,
        "keep_checkpoints": BASE_STEPS,
        "eval": {"every": 5},
    }
    shutil.rmtree(run, ignore_errors=True)
    missing = list(BASES)
    for steps in range(150, BASE_STEPS + 1, 150):  # a constant rate: continuing equals a longer run
        settings = config(out, run, changes | {"steps": steps}, task)
        train(settings)
        evaluations = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
        for base in list(missing):
            good = (e for e in evaluations if e["step"] and e["accuracy"] >= BASES[base])
            if (found := next(good, None)) is not None:
                path = checkpoint.find(run / "checkpoints", found["step"])
                export_checkpoint(settings.model, path, out / f"{task}-{base}")
                missing.remove(base)
        if not missing:
            break
    shutil.rmtree(run)


def check_base(out: Path, base: str, results: Path) -> None:
    """Raise ConfigError unless the weights of `base` are those of its finished runs, if any.

    Training is deterministic, but another machine or version may round differently.
    """
    digest = hashlib.sha256((out / base / "model.safetensors").read_bytes()).hexdigest()
    path = results / "bases.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    if saved.get(base, digest) != digest:
        raise ConfigError(
            f"--results {results}: its runs used other weights of the base {base}: continue on a "
            "machine that trains the same, choose another folder, or leave it out with --bases"
        )
    path.write_text(json.dumps(saved | {base: digest}, indent=1) + "\n")


def run_cell(out: Path, cell: Cell, arm: Arm) -> dict[str, Any]:
    """Train one cell; returns its line of the results."""
    run = out / "cell"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    sampling = METHODS[arm.method["name"]]().sampling(COMPLETIONS)
    data = {"prompts": str(run / "prompts.jsonl"), "demos": None}
    if arm.sources:
        data["source_field"] = "source"
    if arm.prompts:
        write_data(run / "prompts.jsonl", cell, arm.prompts, arm.steps, cell.seed, "prompts")
    if sampling.demos == "separate" and arm.demos:
        data["demos"] = str(run / "demos.jsonl")
        write_data(run / "demos.jsonl", cell, arm.demos, arm.steps, cell.seed + 1, "demos")
    settings = config(
        out,
        run / "run",
        {
            "model": {"path": str(out / f"{cell.task}-{cell.base}")},
            "data": data,
            "method": arm.method,
            "rollouts": {
                "num_prompts": max(arm.prompts, 1),
                "num_generations": COMPLETIONS,
                "max_completion_length": KINDS[cell.task].response_tokens + 1,
                "function": FUNCTION if KINDS[cell.task].turns else None,
                "log_samples_every": 0,
            },
            "demo_batch_size": max(arm.demos, 1),
            "optim": {"lr": arm.lr, "betas": [0.9, 0.99], "warmup_steps": 5},
            "steps": arm.steps,
            "seed": cell.seed,
            "eval": {"every": 16},
        },
        cell.task,
    )
    started = time.process_time()
    train(settings)
    seconds = time.process_time() - started
    evaluations = (run / "run" / "eval.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        **cell._asdict(),
        "accuracy": [round(json.loads(line)["accuracy"], 4) for line in evaluations],
        "evaluated": [json.loads(line)["step"] for line in evaluations],
        "mu": round(sum(s["mu"] for s in steps) / len(steps), 4),
        "tokens": sum(s["tokens"] for s in steps),
        "seconds": round(seconds, 3),
    }


def finished(path: Path) -> list[dict[str, Any]]:
    """The results in `path`, one per line; empty if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_grid(out: Path, path: Path, cells: Iterable[tuple[Cell, Arm]], code: str) -> None:
    """Train the cells that have no line in `path` yet, and append one line for each."""
    done = {Cell(*(row[key] for key in Cell._fields)) for row in finished(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    checked: set[str] = set()
    for cell, arm in cells:
        if cell in done:
            continue
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            base = f"{cell.task}-{cell.base}"
            if base not in checked:
                make_bases(out, cell.task)
                check_base(out, base, path.parent)
                checked.add(base)
            result = run_cell(out, cell, arm)
        with path.open("a") as file:
            file.write(json.dumps({**result, "code": code}) + "\n")


def tuning_cells() -> Iterator[tuple[Cell, Arm]]:
    """Every candidate on the tuning cells."""
    for arm, candidates in CANDIDATES.items():
        pairs = itertools.product(TUNING_CELLS, enumerate(candidates))
        for (task, base, condition), (i, candidate) in pairs:
            yield Cell(task, base, condition, f"{arm}/{i}", TUNING_SEED), candidate


def tuning_means(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Tuned arm -> candidate -> mean final accuracy; only arms whose tuning runs are complete."""
    finals: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        arm, candidate = row["arm"].split("/")
        finals.setdefault(arm, {}).setdefault(int(candidate), []).append(row["accuracy"][-1])
    return {
        arm: {i: sum(values) / len(values) for i, values in sorted(candidates.items())}
        for arm, candidates in finals.items()
        if sum(map(len, candidates.values())) == len(CANDIDATES[arm]) * len(TUNING_CELLS)
    }


def arms(results: Path) -> dict[str, Arm]:
    """The arms whose settings are known, each tuned one with its best candidate."""
    means = tuning_means(finished(results / "tuning.jsonl"))
    best = {arm: max(values, key=lambda i: values[i]) for arm, values in means.items()}
    return {arm: CANDIDATES[arm][i] for arm, i in best.items()} | FIXED


def final_cells(results: Path) -> Iterator[tuple[Cell, Arm]]:
    """Every arm on every task, condition, base and seed; sources have names in two conditions."""
    known = arms(results)
    for base, names in PHASES:
        for seed, task, condition, name in itertools.product(SEEDS, TASKS, CONDITIONS, names):
            unnamed = name == "named-sources" and condition in ("good", "other-style")
            if name in known and not unnamed:
                yield Cell(task, base, condition, name, seed), known[name]


def confirmation_cells(results: Path) -> Iterator[tuple[Cell, Arm]]:
    """The arms of the confirmation on every task, base and condition, with its own seeds."""
    known = arms(results)
    for seed, base, task, condition, (name, (arm, changes)) in itertools.product(
        CONFIRMATION_SEEDS, BASES, TASKS, CONDITIONS, CONFIRMED.items()
    ):
        changed = known[arm]._replace(method=known[arm].method | changes)
        yield Cell(task, base, condition, name, seed), changed


def turns_cells(results: Path) -> Iterator[tuple[Cell, Arm]]:
    """The arms of the continuation, as in the study, on the task with two turns."""
    known = arms(results)
    for seed, base, condition, name in itertools.product(SEEDS, BASES, CONDITIONS, TURNS):
        yield Cell("tool", base, condition, name, seed), known[name]


GRIDS = {"final": final_cells, "confirmation": confirmation_cells, "turns": turns_cells}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the cells that have no result yet; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.study_run", description=__doc__)
    parser.add_argument("grid", choices=("tuning", *GRIDS))
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument(
        "--bases", nargs="+", choices=BASES, default=list(BASES), help="all if absent"
    )
    parser.add_argument("--code", default="", help="commit of the code, saved with each result")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    args.out.mkdir(parents=True, exist_ok=True)
    cells = tuning_cells() if args.grid == "tuning" else GRIDS[args.grid](args.results)
    cells = (pair for pair in cells if pair[0].base in args.bases)
    run_grid(args.out, args.results / f"{args.grid}.jsonl", cells, args.code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
