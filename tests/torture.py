"""Kill runs of many kinds at random times; each must end exactly like an undisturbed run.

`make torture`, or `python -m tests.torture --minutes 10 --seed 0`: every trial picks a kind of run
and kills its processes (SIGKILL one rank, or SIGTERM or SIGINT all) at random times until the run
ends. Metrics, evaluations, samples and the weights of the last checkpoint are then compared with
those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gac.faults import checkpoint
from gac.training.trainer import train

from . import ranks
from .tiny import TIMING_KEYS, tiny_config, write_tiny

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (1, {}),
    "sft": (1, {"method": "sft"}),
    "grpo, reused rollouts": (1, {"method": "grpo", "loss": {"kl_coef": 0.1}, "reuse": 2}),
    "gated": (1, {"method": "gac-gated", "micro_tokens": 128}),
    "gradient surgery": (1, {"method": "pcgrad"}),
    "adapters": (1, {"model.lora": {"rank": 2}}),
    "resampling": (1, {"resample": 2, "skip_truncated": True}),
    "two ranks": (2, {"micro_batch": 2}),
    "two shards": (2, {"parallel": {"mode": "fsdp", "timeout": 60}}),
}
STEPS, EVERY, LONGEST = 8, 2, 8.0  # steps, steps between checkpoints, seconds before a kill


def main() -> int:
    """Run trials for `--minutes`; the exit code is 1 if any result differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, started = random.Random(options.seed), time.monotonic()
    expected: dict[str, Any] = {}
    trials, kills, wrong = 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        task = write_tiny(Path(name))
        while time.monotonic() - started < 60 * options.minutes:
            kind = rng.choice(list(KINDS))
            if kind not in expected:
                expected[kind] = result(undisturbed(task, kind))
            out, count = tortured(task, kind, trials, rng)
            same = result(out) == expected[kind]
            trials, kills, wrong = trials + 1, kills + count, wrong + (not same)
            print(f"{kind}: {count} kills, {'equal' if same else 'DIFFERENT'}", flush=True)
    print(f"{trials} runs, {kills} kills: {trials - wrong} ended bit for bit like undisturbed ones")
    return int(wrong > 0)


def config_of(task: Path, kind: str, out: Path) -> Any:
    """The configuration of a run of this kind."""
    changes = dict(KINDS[kind][1])
    rollouts = {"prompts": 4, "completions": 4, "max_new_tokens": 5, "sample_every": 2}
    for key in ("reuse", "resample", "skip_truncated"):
        if key in changes:
            rollouts[key] = changes.pop(key)
    model = {"path": str(task / "init"), "random_init": True}
    if "model.lora" in changes:
        model["lora"] = changes.pop("model.lora")
    changes |= {"steps": STEPS, "checkpoint_every": EVERY, "rollouts": rollouts, "model": model}
    return tiny_config(task, out, **changes)


def undisturbed(task: Path, kind: str) -> Path:
    """Train without kills; returns the run directory."""
    out = task / f"expected {kind}"
    ranks.run(train, config_of(task, kind, out), ranks=KINDS[kind][0])
    return out


def tortured(task: Path, kind: str, number: int, rng: random.Random) -> tuple[Path, int]:
    """Train with kills until the run ends; returns the run directory and the number of kills."""
    out, kills = task / f"run {number}", 0
    config = config_of(task, kind, out)
    while True:
        with ranks.job(train, config, ranks=KINDS[kind][0]) as processes:
            # the later the attempt, the longer it may run, so that every run ends
            deadline = time.monotonic() + rng.uniform(0, LONGEST) * (1 + kills / 4)
            while time.monotonic() < deadline and any(p.process.is_alive() for p in processes):
                time.sleep(0.01)
            alive = [p for p in processes if p.process.is_alive()]
            if alive:
                kills += 1
                number_of_signal = rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
                for process in alive[: 1 if number_of_signal == signal.SIGKILL else None]:
                    os.kill(process.process.pid or 0, number_of_signal)
                for process in alive:
                    process.process.join(30)
                continue
            results = [process.result() for process in processes]
        for outcome in results:
            if isinstance(outcome, ranks.Failed):
                raise AssertionError(f"{kind}: {outcome.trace}")
        return out, kills


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
    path = checkpoint.list_complete(out / "checkpoints")[-1]
    tensors = checkpoint.read_tensors(path, checkpoint.model_tensors(path))
    sums = {name: x.view(torch.uint8).tolist() for name, x in sorted(tensors.items())}
    return path.name, rows, sums


if __name__ == "__main__":
    raise SystemExit(main())
