"""Runs the fifth study: `python -m tools.study_run [final|tuning] --out FOLDER`.

Its protocol is in docs/study.md. Trains the cells of a grid in one process, in order of importance;
each result is one line of bench/results/study/*.jsonl, so an interrupted command continues where it
stopped. FOLDER holds the base models, which are trained once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GPT2Config

from gac.config import load
from gac.data.order import Order
from gac.demo.task import make_tokenizer, write_rows
from gac.methods import METHODS
from gac.training.export import export_checkpoint
from gac.training.run_config import TrainConfig
from gac.training.trainer import train
from tools.study_tasks import ALPHABET, TASKS, Problem, corrupt, restyle

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results" / "study"
STEPS = 60
COMPLETIONS = 6
ROWS = 48
"""Rows per optimizer step: demonstrations plus rollouts."""
CHANGE = 0.4
"""Share of the run after which the demonstrations of `good-then-bad` are wrong."""
WRONG = 0.5
"""Share of wrong demonstrations in `partly-wrong`."""
LR = 1e-3
EVALUATED = 300
BASES = {"weak": 0.05, "mid": 0.25}
"""Base model -> sampled accuracy at which its training stops."""
BASE_NOISE, BASE_STEPS, BASE_ROWS = 0.1, 1500, 20_000
CONDITIONS = ("good", "partly-wrong", "good-then-bad", "other-style")
SEEDS = range(5)
TUNING_SEEDS = range(100, 102)


class Arm(NamedTuple):
    """A method with its settings, and how a step's rows are divided."""

    method: dict[str, Any]
    """`name` and fields of the method."""
    demos: int = 12
    """Demonstrations per step from the separate set."""
    prompts: int = 6
    """Prompts per step, with `COMPLETIONS` rollouts each."""
    steps: int = STEPS
    sources: bool = False
    """Whether the data name the source of each demonstration."""


class Cell(NamedTuple):
    """One run of the grid."""

    task: str
    base: str
    condition: str
    arm: str
    seed: int


def demonstration(condition: str, problem: Problem, share: float, rng: random.Random) -> str:
    """A demonstration at `share` of the run."""
    bad = (condition == "partly-wrong" and rng.random() < WRONG) or (
        condition == "good-then-bad" and share >= CHANGE
    )
    text = corrupt(problem.solution, rng) if bad else problem.solution
    return restyle(text) if condition == "other-style" else text


def write_data(path: Path, cell: Cell, per_step: int, steps: int, order_seed: int, kind: str) -> None:
    """Write `steps * per_step` problems so that a run visits them in the order of generation.

    The trainer visits the rows in a permutation that depends only on their number and the seed, so
    the k-th problem goes where the permutation looks k-th. All problems are visited once.
    """
    rng = random.Random(f"{cell.task}/{cell.condition}/{cell.seed}/{kind}")
    visited = Order(per_step * steps, order_seed).take(per_step * steps)
    rows: list[dict[str, Any]] = [{}] * len(visited)
    for k, row in enumerate(visited):
        problem = TASKS[cell.task].problem(rng)
        demo = demonstration(cell.condition, problem, k / len(visited), rng)
        rows[row] = {**_row(cell.task, k, problem), "solution": demo}
    write_rows(path, rows)


def _row(task: str, index: int, problem: Problem) -> dict[str, Any]:
    return {"id": f"{index}", "prompt": problem.prompt, "answer": problem.solution, "task": task}


def config(out: Path, run: Path, changes: Mapping[str, Any], task: str) -> TrainConfig:
    """The settings that all runs share, with `changes`."""
    evaluation = {
        "data": {"prompts": str(out / f"{task}-eval.jsonl")},
        "max_new_tokens": TASKS[task].response_tokens + 1,
        "batch": None,
    }
    shared = {
        "out": str(run),
        "reward": "tools.study_tasks:reward",
        "micro_batch": 1000,
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
    problems = [TASKS[task].problem(rng) for _ in range(BASE_ROWS)]
    rows = [
        {**_row(task, i, p), "solution": corrupt(p.solution, rng, BASE_NOISE)}
        for i, p in enumerate(problems)
    ]
    write_rows(out / f"{task}-base.jsonl", rows)
    write_rows(
        out / f"{task}-eval.jsonl",
        [_row(task, i, TASKS[task].problem(rng)) for i in range(EVALUATED)],
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
        "optim": {"lr": 3e-3, "warmup": 20, "schedule": "constant"},
        "demo_batch": 64,
        "checkpoint_every": 25,
        "keep_checkpoints": 100,
        "eval": {"every": 25, "samples": 2, "temperature": 1.0},
    }
    shutil.rmtree(run, ignore_errors=True)
    missing = list(BASES)
    for steps in range(300, BASE_STEPS + 1, 300):  # a constant rate: continuing equals a longer run
        settings = config(out, run, changes | {"steps": steps}, task)
        train(settings)
        evaluations = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
        for base in list(missing):
            good = (e for e in evaluations if e["step"] and e["accuracy"] >= BASES[base])
            if (found := next(good, None)) is not None:
                step = run / "checkpoints" / f"step_{found['step']:08d}"
                path = next(p for p in step.parent.iterdir() if p.name.endswith(step.name[5:].lstrip("0")))
                export_checkpoint(settings.model, path, out / f"{task}-{base}")
                save = {"task": task, "base": base, "step": found["step"], "accuracy": found["accuracy"]}
                print(json.dumps(save), flush=True)
                missing.remove(base)
        if not missing:
            break
    shutil.rmtree(run)


def run_cell(out: Path, cell: Cell, arm: Arm) -> dict[str, Any]:
    """Train one cell; returns its line of the results."""
    run = out / "cell"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    sampling = METHODS[arm.method["name"]]().sampling(COMPLETIONS)
    data = {"prompts": str(run / "prompts.jsonl"), "demos": None}
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
                "prompts": max(arm.prompts, 1),
                "completions": COMPLETIONS,
                "max_new_tokens": TASKS[cell.task].response_tokens + 1,
                "sample_every": 0,
            },
            "demo_batch": max(arm.demos, 1),
            "optim": {"lr": LR, "betas": [0.9, 0.99], "warmup": 5},
            "steps": arm.steps,
            "seed": cell.seed,
            "eval": {"every": STEPS // 3},
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
        "mu": round(sum(s["mu"] for s in steps) / len(steps), 4),
        "tokens": sum(s["tokens"] for s in steps),
        "seconds": round(seconds, 3),
    }


def quiet(function: Any, *arguments: Any) -> Any:
    """Call `function` without its progress bars and log lines."""
    logging.disable(logging.WARNING)
    with contextlib.redirect_stderr(io.StringIO()):
        return function(*arguments)
