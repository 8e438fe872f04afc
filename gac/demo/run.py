"""`gac demo`: train a tiny base model, post-train it with several methods, and compare them.

Every stage is an ordinary `gac train` run in its own folder. Finished stages are skipped, and
interrupted ones resume from their checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gac.config import load, save
from gac.config.types import unknown_name_message
from gac.errors import ConfigError, RunError, writable_folder
from gac.faults.checkpoint import list_complete, read_progress
from gac.methods import METHODS as TABLE
from gac.report import results_table, write_report
from gac.training.run_config import TrainConfig

from . import METHODS
from .settings import demo_fields
from .task import write_task

BASE_ACCURACY = (0.01, 0.10)  # accepted subtraction accuracy of the base model: low, but not zero


def run_demo(
    out: Path,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0,),
    steps: int = 160,
    jobs: int | None = None,
    base_steps: int = 400,
) -> int:
    """Train the base model, then each method with each seed; write the report, print its table."""
    for name in methods:
        if name not in TABLE:
            raise ConfigError(unknown_name_message("--methods", name, TABLE, "method"))
    writable_folder("--out", out)
    started = time.perf_counter()
    jobs = jobs or min(len(os.sched_getaffinity(0)), len(methods) * len(seeds))
    task = out / "task"
    if not (task / "init" / "config.json").exists():
        write_task(task, seed=0)
    base = make_base(out, base_steps)
    runs = {f"{m}-{s}": method_config(out, base, m, s, steps) for m in methods for s in seeds}
    run_all(runs, out, jobs)
    folders = [Path(c.out) for c in runs.values()]
    page = write_report(folders, out)
    print(f"\n{results_table(folders)}\n")
    print(f"Total time: {time.perf_counter() - started:.0f} s.")
    print(f"Report: {page}")
    print("Next: gac demo --methods gac constant --seeds 3, or train your own model:")
    print("      gac train examples/gsm8k.yaml --set model.path=/path/to/a/model")
    return 0


def make_base(
    out: Path,
    steps: int,
    seeds: Sequence[int] = range(5),
    accepted: tuple[float, float] | None = None,
    data: str = "base",
) -> Path:
    """Train the base model on the task's file `data`, unless it exists, and return its folder.

    A base model that solves no subtractions, or many, makes the comparison uninformative, so seeds
    are tried until its subtraction accuracy is in the interval `accepted` (None: `BASE_ACCURACY`).
    Each accuracy is printed.
    """
    low, high = BASE_ACCURACY if accepted is None else accepted
    for seed in seeds:
        run = out / f"{data}-{seed}"
        config = base_config(out, run, seed, steps, data)
        run_all({run.name: config}, out, jobs=1)
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
        "max_new_tokens": 9,
        "batch": None,
        "split_field": "op",
    }
    shared = {
        "out": str(run),
        "reward": "gac.demo.task:reward",
        "rollouts": {"prompts": 12, "completions": 8, "max_new_tokens": 9},
        "checkpoint_every": 20,
    }
    merged = {
        "data": data | changes.get("data", {}),
        "eval": evaluation | changes.get("eval", {}),
    }
    return load(TrainConfig, shared | changes | merged)


def base_config(out: Path, run: Path, seed: int, steps: int, data: str = "base") -> TrainConfig:
    """SFT of a randomly initialized model on the weak teacher's solutions."""
    task = out / "task"
    return _config(
        out,
        run,
        {
            "model": {"path": str(task / "init"), "random_init": True},
            "data": {"prompts": None, "demos": str(task / f"{data}.jsonl")},
            "method": {"name": "sft"},
            "name": "base",
            "optim": {"lr": 3e-3, "betas": [0.9, 0.99], "warmup": 10, "final": 0.0},
            "steps": steps,
            "demo_batch": 64,
            "seed": seed,
            "checkpoint_every": 100,
            "eval": {"samples": 4, "temperature": 1.0},
        },
    )


def method_config(out: Path, base: Path, name: str, seed: int, steps: int) -> TrainConfig:
    """A post-training run of the base model; only the method and the seed differ between runs.

    Methods that train on demonstrations of the sampled prompts get one for every subtraction; all
    others get a separate set of 256.
    """
    data = {"demos": str(out / "task" / "demos.jsonl")}
    if TABLE[name]().sampling(completions=8).demos == "prompt":
        data = {"prompts": str(out / "task" / "prompts_demos.jsonl")}
    return _config(
        out,
        out / f"{name}-{seed}",
        {
            "model": {"path": str(base)},
            "data": data,
            "method": {"name": name, **demo_fields(name, steps)},
            "optim": {"lr": 2e-4, "betas": [0.9, 0.99], "warmup": 10},
            "steps": steps,
            "demo_batch": 32,
            "seed": seed,
            "eval": {"every": 20},
            "monitor_kl_every": 10,
            "export": False,
        },
    )


def run_all(runs: dict[str, TrainConfig], out: Path, jobs: int) -> None:
    """Run each configuration in its own process, `jobs` at a time; finished runs are skipped."""
    pending = {name: c for name, c in runs.items() if not _finished(c)}
    running: dict[str, subprocess.Popen] = {}
    threads = max(len(os.sched_getaffinity(0)) // jobs, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        while pending or running:
            while pending and len(running) < jobs:
                name = next(iter(pending))
                config = pending.pop(name)
                path = out / f"{name}.yaml"
                save(config, path)
                print(f"training {name} ({config.steps} steps) ...", flush=True)
                # progress bars of several runs would overwrite each other
                log = None if jobs == 1 else (out / f"{name}.log").open("w")
                command = [sys.executable, "-m", "gac.cli", "train", str(path)]
                running[name] = subprocess.Popen(
                    command, env=environment, preexec_fn=exit_with_parent, stderr=log
                )
            for name, process in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    if process.returncode:
                        raise RunError(f"{name} failed (exit {process.returncode}); see {out}")
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


# loaded at import: after a fork, a lock held by another thread would never be released
_libc = ctypes.CDLL(None)


def exit_with_parent() -> None:
    """Make Linux terminate this process when its parent exits, so that no process is orphaned."""
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG


def _finished(config: TrainConfig) -> bool:
    done = list_complete(Path(config.out) / "checkpoints")
    exported = not config.export or (Path(config.out) / "model" / "config.json").exists()
    return bool(done) and read_progress(done[-1])["step"] >= config.steps and exported
