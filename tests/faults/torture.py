"""Kill runs of many kinds at random times; each must end exactly like an undisturbed run.

`make torture`, or `python -m tests.faults.torture --minutes 10 --seed 0`: every trial picks a kind
of run and kills it until it ends: SIGKILL, SIGTERM or SIGINT, at a random time or after a random
number of function calls within a phase of the run. Metrics, evaluations, samples, the last
checkpoint and the exported model are then compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import gac.report
from gac.evaluation.suite import Evaluator
from gac.faults import checkpoint
from gac.rollouts.sampling import Sampler
from gac.train_config import TrainConfig
from gac.training import trainer
from tests import ranks
from tests.tiny import TIMING_KEYS, tiny_config, write_tiny

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (1, {}),
    "sft": (1, {"method": "sft"}),
    "grpo, reused rollouts": (1, {"method": "grpo", "loss": {"kl_coef": 0.1}, "num_iterations": 2}),
    "gated": (1, {"method": "gac-gated", "max_tokens_per_micro_batch": 128}),
    "gradient surgery": (1, {"method": "pcgrad"}),
    "adapters": (1, {"model.lora": {"rank": 2}, "loss": {"kl_coef": 0.1}}),
    "resampling": (1, {"dynamic_sampling_retries": 2, "mask_truncated_completions": True}),
    "best weights": (1, {"method": "sft-best"}),
    "early stopping": (1, {"method": {"name": "sft-light", "patience": 1}}),
    "two ranks": (2, {"micro_batch_size": 2}),
    "two shards": (2, {"parallel": {"mode": "fsdp", "timeout": 60}}),
}
PHASES: dict[str, tuple[Any, str]] = {
    "sampling": (Sampler, "__call__"),
    "rewards": (Sampler, "_scores"),
    "gradients and update": (trainer.Trainer, "_train_step"),
    "checkpoint": (checkpoint, "save"),
    "evaluation": (Evaluator, "__call__"),
    "export": (trainer, "export_checkpoint"),
    "report": (gac.report, "write_report"),
}
STEPS, EVERY, LONGEST = 8, 2, 6.0  # steps, steps between checkpoints, seconds before a kill
CALLS = 10_000  # function calls and returns within a phase before a kill, at most
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """Run trials for `--minutes`; the exit code is 1 if any result differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, started = random.Random(options.seed), time.monotonic()
    expected: dict[str, Any] = {}
    trials, wrong, kills = 0, 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        task = write_tiny(Path(name))
        while time.monotonic() - started < 60 * options.minutes:
            kind = rng.choice(list(KINDS))
            if kind not in expected:
                expected[kind] = result(undisturbed(task, kind))
            out, places = tortured(task, kind, trials, rng)
            same = result(out) == expected[kind]
            trials, wrong, kills = trials + 1, wrong + (not same), kills + Counter(places)
            print(f"{kind}: {places}, {'equal' if same else 'DIFFERENT'}", flush=True)
    print(", ".join(f"{count} in {place}" for place, count in kills.most_common()))
    total = f"{trials} runs, {kills.total()} kills"
    print(f"{total}: {trials - wrong} ended bit for bit like undisturbed ones")
    return int(wrong > 0)


def complete_run(config: TrainConfig) -> Path:
    """Train, evaluate, export and write the report, as `gac train` does."""
    out = trainer.train(config)
    if os.environ.get("RANK", "0") == "0":
        gac.report.write_report([out], out)
    return out


def interrupted_run(config: TrainConfig, rank: int, phase: str, call: int, number: int) -> Path:
    """`complete_run`; `rank` gets signal `number` at a function call or return within `phase`."""
    owner, name = PHASES[phase]
    original, calls = getattr(owner, name), itertools.count(1)

    def count(*_: Any) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), number)

    def counted(*arguments: Any, **options: Any) -> Any:
        sys.setprofile(count)
        try:
            return original(*arguments, **options)
        finally:
            sys.setprofile(None)

    if os.environ.get("RANK", "0") == str(rank):
        setattr(owner, name, counted)
    return complete_run(config)


def config_of(task: Path, kind: str, out: Path) -> Any:
    """The configuration of a run of this kind."""
    changes = dict(KINDS[kind][1])
    rollouts = {
        "num_prompts": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        "log_samples_every": 2,
    }
    for key in ("num_iterations", "dynamic_sampling_retries", "mask_truncated_completions"):
        if key in changes:
            rollouts[key] = changes.pop(key)
    model = {"path": str(task / "init"), "random_init": True}
    if "model.lora" in changes:
        model["lora"] = changes.pop("model.lora")
    evaluation = {
        "data": {"prompts": str(task / "eval.jsonl")},
        "max_completion_length": 5,
        "every": 3,
    }
    changes |= {"steps": STEPS, "checkpoint_every": EVERY, "rollouts": rollouts, "model": model}
    return tiny_config(task, out, eval=evaluation, export=True, **changes)


def undisturbed(task: Path, kind: str) -> Path:
    """Train without kills; returns the run directory."""
    out = task / f"expected {kind}"
    ranks.run(complete_run, config_of(task, kind, out), ranks=KINDS[kind][0])
    return out


def tortured(task: Path, kind: str, number: int, rng: random.Random) -> tuple[Path, list[str]]:
    """Train with kills until the run ends; returns its directory and where it was killed."""
    out, places = task / f"run {number}", list[str]()
    config, world = config_of(task, kind, out), KINDS[kind][0]
    while True:
        phase = rng.choice([*PHASES, *["a random time"] * len(PHASES)])
        if phase in PHASES:
            # the logarithm is uniform: short and long phases are hit early and late
            call = int(CALLS ** rng.random()) * (1 + len(places) // 4)
            work: tuple[Any, ...] = interrupted_run, config, rng.randrange(world), phase, call
            work = *work, rng.choice(SIGNALS)
        else:
            work = complete_run, config
        with ranks.job(*work, ranks=world) as processes:
            if phase not in PHASES:
                # the later the attempt, the longer it may run, so that every run ends
                seconds = rng.uniform(0, LONGEST) * (1 + len(places) / 4)
                kill_after(seconds, processes, rng.choice(SIGNALS))
            results = [process.result() for process in processes]
        killed = [r is None or is_interrupt(r) for r in results]
        for outcome in results:
            if isinstance(outcome, ranks.Failed) and not any(killed):
                raise AssertionError(f"{kind}, {phase}: {outcome.trace}")
        if not any(killed):
            return out, places
        places.append(phase)


def kill_after(seconds: float, processes: list[ranks.Rank], number: int) -> None:
    """Send a signal to the processes (SIGKILL: to one), unless they end within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(p.process.is_alive() for p in processes):
        time.sleep(0.01)
    alive = [p for p in processes if p.process.is_alive()]
    for process in alive[: 1 if number == signal.SIGKILL else None]:
        os.kill(process.process.pid or 0, number)


def is_interrupt(outcome: Any) -> bool:
    """Whether a rank stopped because of SIGINT or SIGTERM."""
    return isinstance(outcome, ranks.Failed) and isinstance(outcome.error, KeyboardInterrupt)


def result(out: Path) -> Any:
    """Everything that must not depend on kills."""
    files = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
    rows = {
        name: [
            {k: v for k, v in json.loads(line).items() if k not in TIMING_KEYS}
            for line in (out / name).read_text().splitlines()
        ]
        for name in files
        if (out / name).exists()
    }
    assert (out / "report.html").exists()
    path = checkpoint.list_complete(out / "checkpoints")[-1]
    tensors = checkpoint.read_tensors(path, checkpoint.model_tensors(path))
    sums = {name: x.view(torch.uint8).tolist() for name, x in sorted(tensors.items())}
    return path.name, rows, sums, (out / "model" / "model.safetensors").read_bytes()


if __name__ == "__main__":
    raise SystemExit(main())
