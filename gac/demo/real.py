"""`gac demo --real`: train a pretrained model with both signals and with rewards only.

Both runs are ordinary `gac train` runs in their own folders. Finished ones are skipped, and
interrupted ones resume from their checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gac.config import load
from gac.errors import RunError, writable_folder
from gac.models.source import check_files, check_source
from gac.report import results_table, write_report
from gac.study.runs import run_all
from gac.train_config import TrainConfig

from . import REAL_METHODS
from .real_model import fetch_model
from .real_task import write_task
from .run import check_methods

STEPS = 16
LENGTH = 12  # tokens: an order code has at most eleven and the end of the turn


def run_real(
    out: Path,
    source: str | None = None,
    methods: Sequence[str] = REAL_METHODS,
    steps: int = STEPS,
    jobs: int | None = None,
) -> int:
    """Train the model with each method; write the report and print its table.

    source: a local folder or a name on the Hub; None: SmolLM2-135M-Instruct, downloaded once.
    """
    check_methods(methods)
    writable_folder("--out", out)
    started = time.perf_counter()
    if source is None:
        model = str(fetch_model())
    else:
        check_source("--real", source)
        check_files("--real", source, "model", "give a transformers model", "config.json")
        model = source
    task = out / "task"
    if not (task / "eval.jsonl").exists():  # the last file written
        write_task(task)
    runs = [config(out, model, name, steps) for name in methods]
    print(f"Training {model} in {runs[0].model.dtype}: {', '.join(methods)}", flush=True)
    jobs = jobs or (1 if torch.cuda.is_available() else min(len(os.sched_getaffinity(0)), 2))
    progress = Progress(runs)
    failed = run_all(runs, jobs, report=True, log=progress.log, watch=progress)
    if failed:
        raise RunError("; ".join(f"{folder}: {reason}" for folder, reason in failed.items()))
    folders = [Path(run.out) for run in runs]
    page = write_report(folders, out)
    print(f"\n{results_table(folders)}\n")
    print(f"Total time: {time.perf_counter() - started:.0f} s.")
    print(f"Report: {page}")
    print(f"Next: your own questions and answers: gac init first --model {model}")
    return 0


def config(out: Path, model: str, method: str, steps: int) -> TrainConfig:
    """Configuration of a run; runs differ only in their method."""
    task = out / "task"
    settings: dict[str, Any] = {
        "out": str(out / method),
        "run_name": method,
        "model": {"path": model, "dtype": "bfloat16" if has_fast_bfloat16() else "float32"},
        "method": method,
        "data": {
            "prompts": str(task / "prompts.jsonl"),
            "demos": str(task / "demos.jsonl"),
            "source_field": "kind",  # for the reward on each kind of prompt
        },
        "reward": "gac.demo.real_task:reward",
        "rollouts": {"num_prompts": 6, "num_generations": 4, "max_completion_length": LENGTH},
        "demo_batch_size": 8,
        "steps": steps,
        "optim": {"lr": 2e-5, "warmup_steps": 2},
        "max_tokens_per_micro_batch": 2048,  # the same on any machine: the order of sums follows it
        "eval": {
            "data": {"prompts": str(task / "eval.jsonl")},
            "every": steps,
            "max_completion_length": LENGTH,
            "batch": None,
            "split_field": "kind",
        },
        "checkpoint_every": 4,
    }
    return load(TrainConfig, settings)


def has_fast_bfloat16() -> bool:
    """Whether bfloat16 is faster than float32 here: a GPU, or a CPU with instructions for it."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


class Progress:
    """Shows how far the runs are, whenever a run has finished a step."""

    def __init__(self, runs: Sequence[TrainConfig]) -> None:
        self.runs = runs
        self.started = time.perf_counter()
        self.shown = ""

    def __call__(self) -> None:
        """Print the steps and the last reward of each run; on a terminal, over the last line."""
        text = ", ".join(map(_state, self.runs))
        if text == self.shown:
            return
        self.shown = text
        line = f"{text} ({time.perf_counter() - self.started:.0f} s)"
        terminal = sys.stdout.isatty()
        print(f"\r{line:<79}" if terminal else line, end="" if terminal else "\n", flush=True)

    def log(self, text: str) -> None:
        """Print a line that stays."""
        print(f"\r{text:<79}" if sys.stdout.isatty() else text, flush=True)


def _state(run: TrainConfig) -> str:
    path = Path(run.out) / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # without one that is being written
    if not lines:
        return f"{run.run_name} 0/{run.steps}"
    last = json.loads(lines[-1])
    reward = last.get("reward_mean")  # not of a method without rollouts
    shown = f"{run.run_name} {last['step']}/{run.steps}"
    return shown if reward is None else f"{shown}, reward {reward:.2f}"
