"""Kill `gac train` at random times; each run must end exactly like an undisturbed one.

`make torture`, or `python -m tools.torture --minutes 10 --seed 0`. Every trial picks a kind of run
and restarts it until it ends, with SIGKILL, SIGTERM or SIGINT after a random time. Its metrics,
evaluations, samples and model are then compared with those of an undisturbed run, and its exit
codes with the documented ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = {  # changes of the task that `gac init` writes, and the number of processes
    "default": ([], 1),
    "sft": (["method=sft"], 1),
    "grpo, reused rollouts": (["method=grpo", "loss.kl_coef=0.1", "rollouts.num_iterations=2"], 1),
    "gated": (["method=gac-gated", "max_tokens_per_micro_batch=1024"], 1),
    "gradient surgery": (["method=pcgrad"], 1),
    "adapters": (["model.lora.rank=2", "loss.kl_coef=0.1"], 1),
    "resampling": (["rollouts.dynamic_sampling_retries=2"], 1),
    "best weights": (["method=sft-best"], 1),
    "two ranks": (["micro_batch_size=16"], 2),
    "two shards": (["parallel.mode=fsdp"], 2),
}
SHORT = ["steps=8", "checkpoint_every=2", "eval.every=3", "rollouts.num_prompts=4", "export=true"]
SHORT += ["rollouts.num_generations=4", "rollouts.log_samples_every=2", "demo_batch_size=8"]
TRAIN = ["-m", "gac.cli", "train", "run.yaml"]
RANKS = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d"
RANKS += " --rdzv-endpoint localhost:0"
TIMES = ("second", "sampling_share")  # in the names of columns that differ from run to run
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
DEADLINE = 300  # seconds for one process


def main() -> int:
    """Run trials for `--minutes`; the exit code is 1 if any result differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, end = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    expected: dict[str, tuple[float, Any]] = {}
    trials, wrong, ends = 0, 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        task = Path(name) / "task"
        subprocess.run([sys.executable, "-m", "gac.cli", "init", task], check=True)
        while time.monotonic() < end:
            kind = rng.choice(list(KINDS))
            if kind not in expected:
                started = time.monotonic()
                code = train(task, kind, f"expected {kind}", None)
                assert code == 0, f"{kind}: exit code {code}"
                expected[kind] = time.monotonic() - started, result(task / f"expected {kind}")
            seconds, wanted = expected[kind]
            out, killed = f"run {trials}", list[str]()
            while True:
                number = rng.choice(SIGNALS)
                # the later the attempt, the longer it may run, so that every run ends
                pause = rng.uniform(0, seconds * (1 + len(killed) / 4))
                code = train(task, kind, out, (pause, number))
                if code == 0:
                    break
                allowed = [-number, 130] + [1] * (KINDS[kind][1] > 1)  # 1: torchrun's
                assert code in allowed, f"{kind}: exit code {code} after {number.name}"
                killed.append(number.name)
            same = result(task / out) == wanted
            trials, wrong, ends = trials + 1, wrong + (not same), ends + Counter(killed)
            print(f"{kind}: {killed}, {'equal' if same else 'DIFFERENT'}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in ends.most_common()))
    print(f"{trials} runs, {ends.total()} kills: {trials - wrong} ended like undisturbed ones")
    return int(wrong > 0)


def train(task: Path, kind: str, out: str, kill: tuple[float, int] | None) -> int:
    """Train with a signal after some seconds, if it is still running; returns the exit code."""
    changes, ranks = KINDS[kind]
    settings = [part for change in [*SHORT, *changes, f"out={out}"] for part in ("--set", change)]
    command = [sys.executable, *(RANKS.split() if ranks > 1 else []), *TRAIN, *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (task / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=task, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(kill[0] if kill else DEADLINE)
        except subprocess.TimeoutExpired:
            assert kill, f"{kind} took more than {DEADLINE} s"
            os.killpg(process.pid, kill[1])
            code = process.wait(DEADLINE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code not in (0, -kill[1], 130):
        print((task / "log.txt").read_text()[-2000:])
    return code


def result(out: Path) -> Any:
    """Everything that must not depend on kills."""
    rows = [
        {k: v for k, v in json.loads(line).items() if not any(word in k for word in TIMES)}
        for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
        if (out / name).exists()
        for line in (out / name).read_text().splitlines()
    ]
    assert (out / "report.html").exists()
    return rows, (out / "model" / "model.safetensors").read_bytes()


if __name__ == "__main__":
    sys.exit(main())
