"""`gac demo`: train a tiny base model, post-train it with several methods, and compare them.

Every stage is an ordinary `gac train` run in its own folder. Finished stages are skipped, and
interrupted ones resume from their checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gac.config import load
from gac.config.convert import unknown_name_message
from gac.errors import ConfigError, RunError, writable_folder
from gac.methods import all_methods
from gac.methods.teacher import TeacherConfig
from gac.report import results_table, write_report
from gac.study.runs import run_all
from gac.train_config import TrainConfig

from . import DEMO_METHODS
from .task import write_task

BASE_ACCURACY = (0.01, 0.10)  # accepted subtraction accuracy of the base model: low, but not zero


def run_demo(
    out: Path,
    methods: Sequence[str] = DEMO_METHODS,
    seeds: Sequence[int] = (0,),
    steps: int = 160,
    jobs: int | None = None,
    base_steps: int = 400,
) -> int:
    """Train the base model, then each method with each seed; write the report, print its table."""
    check_methods(methods)
    writable_folder("--out", out)
    started = time.perf_counter()
    jobs = jobs or min(len(os.sched_getaffinity(0)), len(methods) * len(seeds))
    task = out / "task"
    if not (task / "init" / "config.json").exists():
        write_task(task, seed=0)
    base = make_base(out, base_steps)
    runs = [method_config(out, base, name, seed, steps) for name in methods for seed in seeds]
    _train(runs, jobs)
    folders = [Path(config.out) for config in runs]
    page = write_report(folders, out)
    print(f"\n{results_table(folders)}\n")
    print(f"Total time: {time.perf_counter() - started:.0f} s.")
    print(f"Report: {page}")
    print("Next: gac demo --methods constant-alarm constant --seeds 3, or your own task:")
    print("      gac init first && gac train first/run.yaml")
    return 0


def _train(runs: Sequence[TrainConfig], jobs: int = 1) -> None:
    failed = run_all(runs, jobs, report=True)
    if failed:
        raise RunError("; ".join(f"{out}: {reason}" for out, reason in failed.items()))


def make_base(out: Path, steps: int, seeds: Sequence[int] = range(5)) -> Path:
    """Train a base model, unless already trained; return its folder.

    A base model that solves no subtractions, or many, makes the comparison uninformative, so seeds
    are tried until its subtraction accuracy is in `BASE_ACCURACY`. Each accuracy is printed.
    """
    low, high = BASE_ACCURACY
    for seed in seeds:
        run = out / f"base-{seed}"
        _train([base_config(out, run, seed, steps)])
        last = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
        accuracy = {op: last[f"accuracy/{op}"] for op in "+-"}
        shown = ", ".join(f"{op} {value:.3f}" for op, value in accuracy.items())
        print(f"base model, seed {seed}: sampled accuracy {shown}")
        if low <= accuracy["-"] <= high:
            return run / "model"
    raise RunError(
        f"no base model reached a subtraction accuracy in [{low}, {high}] with {len(seeds)} seeds; "
        f"see {out}"
    )


def _config(out: Path, run: Path, changes: dict) -> TrainConfig:
    """The settings that all stages share, with `changes` merged into them."""
    task = out / "task"
    data = {"prompts": str(task / "prompts.jsonl"), "demo_field": "solution"}
    evaluation = {
        "data": {"prompts": str(task / "eval.jsonl")},
        "max_completion_length": 9,
        "batch": None,
        "split_field": "op",
    }
    shared = {
        "out": str(run),
        "reward": "gac.demo.task:reward",
        "rollouts": {"num_prompts": 12, "num_generations": 8, "max_completion_length": 9},
        "micro_batch_size": 1000,  # all rows of a step in one forward, on any machine
        "checkpoint_every": 20,
    }
    merged = {
        "data": data | changes.get("data", {}),
        "eval": evaluation | changes.get("eval", {}),
    }
    return load(TrainConfig, shared | changes | merged)


def base_config(out: Path, run: Path, seed: int, steps: int) -> TrainConfig:
    """Configuration of the base model's run: SFT from random weights on weak-teacher solutions."""
    task = out / "task"
    return _config(
        out,
        run,
        {
            "model": {"path": str(task / "init"), "random_init": True},
            "data": {"prompts": None, "demos": str(task / "base.jsonl")},
            "method": {"name": "sft"},
            "run_name": "base",
            "optim": {"lr": 3e-3, "betas": [0.9, 0.99], "warmup_steps": 10, "min_lr_ratio": 0.0},
            "steps": steps,
            "demo_batch_size": 64,
            "seed": seed,
            "checkpoint_every": 100,
            "eval": {"samples": 4, "temperature": 1.0},
        },
    )


def check_methods(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is no method or is given twice."""
    for name in names:
        if name not in all_methods():
            raise ConfigError(unknown_name_message("--methods", name, all_methods(), "method"))
        if names.count(name) > 1:
            raise ConfigError(f"--methods: {name!r} is given twice: give each method once")


def method_config(out: Path, base: Path, name: str, seed: int, steps: int) -> TrainConfig:
    """Configuration of a post-training run; runs differ only in their method and seed.

    Methods that train on demonstrations of the sampled prompts get one for every subtraction; all
    others get a separate set of 256.
    """
    data = {"demos": str(out / "task" / "demos.jsonl")}
    method = all_methods()[name]()
    teacher = method.teacher(TeacherConfig())
    if method.sampling(completions=8).demos == "prompt":
        data = {"prompts": str(out / "task" / "prompts_demos.jsonl")}
    return _config(
        out,
        out / f"{name}-{seed}",
        {
            "model": {"path": str(base)},
            "data": data,
            "method": {"name": name, **demo_fields(name, steps)},
            # the whole vocabulary: it is smaller than the default
            "teacher": {"top_k": None} if teacher.active and teacher.candidates else {},
            "run_name": name,
            "optim": {"lr": 2e-4, "betas": [0.9, 0.99], "warmup_steps": 10},
            "steps": steps,
            "demo_batch_size": 32,
            "seed": seed,
            "eval": {"every": 20},
            "monitor_kl_every": 10,
            "export": False,
        },
    )


def demo_fields(name: str, steps: int) -> dict[str, Any]:
    """Overrides for method `name`: schedule lengths scaled to `steps` optimizer steps.

    The published durations assume about 800 steps.
    """
    prior = {"high": 0.85, "low": 0.15, "hold": steps // 20, "decay": steps}
    decaying = {"peak": 0.9, "valley": 0.05, "decay": int(0.6 * steps)}
    wcf = {"peak": 0.5, "valley": 0.02, "warmup": steps // 4, "decay": steps // 2}
    fields: dict[str, dict[str, Any]] = {
        "sft-light": {"examples": 128, "epochs": 5},  # the task has 256 demonstrations in all
        "sft-best": {"epochs": 20},
        "sft-then-rl": {"sft_steps": steps // 2},
        **{key: {"schedule": decaying} for key in ["hpcd", "chord-mu", "chord"]},
        "wcf": {"schedule": wcf},
        **{key: {"calibration": max(steps // 8, 1)} for key in ["kl-ctrl", "rewvar-ctrl"]},
        "amft": {"warmup": steps // 16},
        "uft": {"hint_steps": max(int(0.6 * steps), 1)},
        "prefix-rft": {"low": {"peak": 0.95, "valley": 0.05, "decay": steps}},
        "dwa": {"window": max(steps // 16, 1)},
    }
    scheduled = any(field.name == "prior" for field in dataclasses.fields(all_methods()[name]))
    own_prior = not scheduled or name.startswith("gac-gated")
    return fields.get(name, {}) | ({} if own_prior else {"prior": prior})
