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
from gac.config.types import unknown_word
from gac.errors import ConfigError, RunError, writable_folder
from gac.faults.checkpoint import complete, read_progress
from gac.methods import METHODS as TABLE
from gac.report import results_table, write_report
from gac.training.run_config import TrainConfig

from . import METHODS
from .settings import short
from .task import write_task

GATE = (0.01, 0.10)  # accepted subtraction accuracy of the base model: low, but not zero


def run_demo(
    out: Path,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0,),
    steps: int = 160,
    jobs: int | None = None,
    base_steps: int = 400,
) -> int:
    """Train the base, then each method for each seed; write the report and print its table."""
    for name in methods:
        if name not in TABLE:
            raise ConfigError(unknown_word("--methods", name, TABLE, "method"))
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
    gate: tuple[float, float] | None = None,
    data: str = "base",
) -> Path:
    """Train the base model on the task's file `data`, unless it exists, and return its folder.

    A base that solves no subtractions, or many, makes the comparison uninformative, so seeds are
    tried until the accuracy is within `gate`. Each accuracy is printed.
    """
    low, high = GATE if gate is None else gate
    for seed in seeds:
        run = out / f"{data}-{seed}"
        config = base_config(out, run, seed, steps, data)
        run_all({run.name: config}, out, jobs=1)
        last = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
        found = {op: last[f"accuracy/{op}"] for op in "+-"}
        print(f"base model, seed {seed}: sampled accuracy + {found['+']:.3f}, - {found['-']:.3f}")
        if low <= found["-"] <= high:
            return run / "model"
    raise RunError(
        f"no base model reached a subtraction accuracy in [{low}, {high}] with {len(seeds)} seeds; see {out}"
    )


def _config(out: Path, run: Path, rest: dict) -> TrainConfig:
    task = out / "task"
    data = {"prompts": str(task / "prompts.jsonl"), "demo_field": "solution"}
    return load(
        TrainConfig,
        {
            "out": str(run),
            "data": data | rest.pop("data", {}),
            "reward": "gac.demo.task:reward",
            "rollouts": {"prompts": 12, "completions": 8, "max_new_tokens": 9},
            "eval": {
                "data": {"prompts": str(task / "eval.jsonl")},
                "max_new_tokens": 9,
                "batch": None,
                "split_field": "op",
            }
            | rest.pop("eval", {}),
            "checkpoint_every": 20,
            **rest,
        },
    )


def base_config(out: Path, run: Path, seed: int, steps: int, data: str = "base") -> TrainConfig:
    """SFT of a randomly initialized model on the weak teacher's answers."""
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
    """One post-training run from the base; only the method and the seed differ between runs.

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
            "method": {"name": name, **short(name, steps)},
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
    waiting = {name: c for name, c in runs.items() if not _finished(c)}
    going: dict[str, subprocess.Popen] = {}
    threads = max(len(os.sched_getaffinity(0)) // jobs, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        while waiting or going:
            while waiting and len(going) < jobs:
                name = next(iter(waiting))
                config = waiting.pop(name)
                path = out / f"{name}.yaml"
                save(config, path)
                print(f"training {name} ({config.steps} steps) ...", flush=True)
                log = (
                    None if jobs == 1 else (out / f"{name}.log").open("w")
                )  # progress bars of several runs would overwrite each other
                command = [sys.executable, "-m", "gac.cli", "train", str(path)]
                going[name] = subprocess.Popen(
                    command, env=environment, preexec_fn=die_with_parent, stderr=log
                )
            for name, process in list(going.items()):
                if process.poll() is not None:
                    del going[name]
                    if process.returncode:
                        raise RunError(f"{name} failed (exit {process.returncode}); see {out}")
            time.sleep(0.05)
    finally:
        for process in going.values():
            process.terminate()
        for process in going.values():
            process.wait()


_libc = ctypes.CDLL(
    None
)  # loaded at import: after a fork, a lock held by another thread would never be released


def die_with_parent() -> None:
    """Ask Linux to stop this process when its parent dies, so that a rerun does not meet orphaned
    processes.
    """
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG


def _finished(config: TrainConfig) -> bool:
    done = complete(Path(config.out) / "checkpoints")
    exported = not config.export or (Path(config.out) / "model" / "config.json").exists()
    return bool(done) and read_progress(done[-1])["step"] >= config.steps and exported
