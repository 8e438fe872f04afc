"""Benchmark of GRPO in TRL and in GAC: `python -m bench.bench_trainers [--rounds 6]`.

The trainers alternate step by step.

Both use the same model of 4.2 million parameters, prompts, rewards, batch (8 prompts with 8
completions each) and completion lengths, which are forced (see forced_lengths.py): uniform or
long-tailed. Each trainer runs in its own process on one CPU thread and waits for its turn;
CPU time is measured from the start of one step to the start of the next, including everything the
trainer does in between. GAC runs with every key at its default that the task does not set. Results
are written to bench/results/trainers.json, and as tables to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from gac.evaluation.table import markdown_table
from tools.origin import origin
from tools.pages import BENCHMARKS, fill

from .forced_lengths import COMPLETIONS, MAX_LENGTH, PROMPTS, force, schedule, write
from .record import RESULTS, device_name

ROWS = PROMPTS * COMPLETIONS
MICRO_ROWS = 8
ARMS = {
    "gac": "GAC, defaults",
    "trl": "TRL, all rows in one forward",
    "trl-micro": f"TRL, micro-batches of {MICRO_ROWS} rows",
}
TITLES = {
    "long-tailed": "log-normal, median 32, at most {longest} tokens",
    "uniform": "{longest} tokens each",
}
PACKAGES = ("torch", "transformers", "trl")
LIMIT = 1800  # seconds per step and per start-up; generous for a busy machine


def reward(text: str) -> float:
    """A pseudo-random 0 or 1 that depends only on the completion."""
    return float(zlib.crc32(text.encode()) % 2)


def random_reward(completion: str, example: Any) -> float:
    return reward(completion)


def memory() -> dict[str, float]:
    """Current and peak resident memory of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        name: int(fields[key].split()[0]) / 1024
        for name, key in (("held", "VmRSS"), ("peak", "VmHWM"))
    }


# ---- in the trainer process


def wait_for_turn() -> None:
    """Report the resources used so far, then wait for permission to start the next step."""
    print(json.dumps({"cpu": time.process_time(), **memory()}), file=_OUT, flush=True)
    if not sys.stdin.readline():
        os._exit(0)  # exit mid-run: there is nothing to save


def run_gac(folder: Path, kind: str, steps: int) -> None:
    from gac.config import load
    from gac.train_config import TrainConfig
    from gac.training.trainer import Trainer

    trainer = Trainer(
        load(
            TrainConfig,
            {
                "out": str(folder / f"gac-{kind}"),
                "method": "grpo",
                "model": {"path": str(folder), "random_init": True},
                "data": {"prompts": str(folder / "prompts.jsonl")},
                "reward": "bench.bench_trainers:random_reward",
                "steps": steps,
                "rollouts": {
                    "num_prompts": PROMPTS,
                    "num_generations": COMPLETIONS,
                    "max_completion_length": MAX_LENGTH[kind],
                },
                "optim": {"schedule": "constant", "warmup_steps": 0},
                "checkpoint_every": steps,
                "export": False,
            },
        ),
        resume=False,
    )
    force(trainer.accelerator.unwrap_model(trainer.model), kind)
    step = trainer._train_step

    def wait_and_step() -> Any:
        wait_for_turn()
        return step()

    trainer._train_step = wait_and_step  # type: ignore[method-assign] # the same step, later
    trainer.run()


def run_trl(folder: Path, kind: str, micro: bool, steps: int) -> None:
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: Any, **keywords: Any) -> None:
            wait_for_turn()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    force(model, kind)
    size = MICRO_ROWS if micro else ROWS
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        train_dataset=Dataset.from_json(str(folder / "prompts.jsonl"), cache_dir=str(folder)),
        callbacks=[Turns()],
        args=GRPOConfig(
            output_dir=str(folder / f"trl-{kind}-{micro}"),
            max_steps=steps,
            use_cpu=True,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=ROWS // size,
            num_generations=COMPLETIONS,
            max_completion_length=MAX_LENGTH[kind],
            beta=0.0,
            loss_type="grpo",
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()


def work(arm: str, folder: Path, kind: str, steps: int) -> None:
    if arm == "gac":
        run_gac(folder, kind, steps)
    else:
        run_trl(folder, kind, arm == "trl-micro", steps)


# ---- in the coordinating process


class Worker:
    """A trainer process, paused at the start of a step."""

    def __init__(self, arm: str, folder: Path, kind: str, steps: int) -> None:
        self.arm, self.errors = arm, folder / f"{arm}-{kind}.log"
        with self.errors.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "bench.bench_trainers",
                    "--arm",
                    arm,
                    "--kind",
                    kind,
                    "--folder",
                    str(folder),
                    "--steps",
                    str(steps),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self.last = self._read_report()
        self.start = self.last["held"]

    def _read_report(self) -> dict[str, float]:
        timer = threading.Timer(LIMIT, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            tail = self.errors.read_text()[-2000:]
            raise SystemExit(f"error: {self.arm} exited or took more than {LIMIT} s\n{tail}")
        return json.loads(line)

    def step(self) -> float:
        """CPU seconds of one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        before, self.last = self.last, self._read_report()
        return self.last["cpu"] - before["cpu"]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=LIMIT)


def measure(folder: Path, kind: str, rounds: int) -> dict[str, Any]:
    """Measure one row per arm, and the ratios of TRL's time to ours with confidence intervals."""
    workers = {arm: Worker(arm, folder, kind, rounds + 3) for arm in ARMS}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):  # the first round is a warm-up
        order = list(ARMS)[number % len(ARMS) :] + list(ARMS)[: number % len(ARMS)]
        for arm in order:
            step_seconds = workers[arm].step()
            if number:
                seconds[arm].append(step_seconds)
            line = f"{kind:12} round {number}  {arm:11} {step_seconds:6.2f} s"
            print(line, file=sys.stderr, flush=True)
    for worker in workers.values():
        worker.end()
    tokens = sum(sum(schedule(kind, step)) for step in range(1, rounds + 1))
    arms = {
        arm: {
            "seconds_per_step": round(sum(step_seconds) / rounds, 3),
            "tokens_per_second": round(tokens / sum(step_seconds), 1),
            "peak_mib": round(workers[arm].last["peak"]),
            "peak_above_start_mib": round(workers[arm].last["peak"] - workers[arm].start),
        }
        for arm, step_seconds in seconds.items()
    }
    ratios = {f"{arm} / gac": ratio(seconds[arm], seconds["gac"]) for arm in ARMS if arm != "gac"}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {
        **origin(),
        "device": device_name("cpu"),
        "threads": 1,
        "rounds": rounds,
        "versions": {"python": platform.python_version(), **versions},
        "response_tokens_per_step": round(tokens / rounds, 1),
        "longest": MAX_LENGTH[kind],
        "arms": arms,
        "speed": ratios,
    }


def ratio(theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Total of `theirs` / total of `ours`, with a 95% bootstrap interval over rounds."""
    rng = random.Random(0)
    pairs = list(zip(theirs, ours, strict=True))

    def ratio_of(sample: list[tuple[float, float]]) -> float:
        return sum(a for a, _ in sample) / sum(b for _, b in sample)

    ratios = sorted(ratio_of(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {
        "ratio": round(ratio_of(pairs), 3),
        "ci95": [round(ratios[50], 3), round(ratios[-51], 3)],
    }


def page(lengths: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md."""
    rows = []
    for kind, title in TITLES.items():
        result, arms = lengths[kind], lengths[kind]["arms"]
        rows += [
            (
                title.format(longest=result["longest"]),
                label.replace("TRL", f"TRL {result['versions']['trl']}"),
                f"{arms[arm]['tokens_per_second']:.0f}",
                f"{arms[arm]['peak_above_start_mib']} MiB",
                "" if arm == "gac" else interval(result["speed"][f"{arm} / gac"]),
            )
            for arm, label in ARMS.items()
        ]
    head = ("lengths", "trainer", "tokens per second", "memory increase", "GAC's speedup")
    return markdown_table(head, rows)


def interval(speed: dict[str, Any]) -> str:
    low, high = speed["ci95"]
    return f"{speed['ratio']:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m bench.bench_trainers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="steps per trainer, at least 2")
    parser.add_argument(
        "--kind",
        choices=MAX_LENGTH,
        help="run only this distribution of lengths; stored results of the others are kept",
    )
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        return work(arguments.arm, arguments.folder, arguments.kind, arguments.steps)
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: an interval needs at least 2")
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        requested = [arguments.kind] if arguments.kind else list(MAX_LENGTH)
        kinds = {kind: measure(Path(name), kind, arguments.rounds) for kind in requested}
    path = RESULTS / "trainers.json"
    stored = json.loads(path.read_text())["lengths"] if path.exists() else {}
    lengths = {**stored, **kinds}
    path.write_text(json.dumps({"lengths": lengths}, indent=1) + "\n")
    tables = page(lengths)
    print(tables)
    fill(BENCHMARKS, "trainers", tables)
    return None


if __name__ == "__main__":
    _OUT, sys.stdout = sys.stdout, sys.stderr  # keeps the trainer's own output out of the protocol
    if "--arm" not in sys.argv:
        sys.stdout = _OUT
    main()
