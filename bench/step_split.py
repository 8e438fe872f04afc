"""Time of a training step by part: `python -m bench.step_split [CONFIG.yaml] [--steps 40]`.

Without a configuration, it trains the demo's tiny model with GAC from random weights and writes
bench/results/step_split.json. Time in a nested part is counted in that part only; "rest" is
rewards, batches, statistics, controller and logging. On a CPU, CPU time is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gac.models.head
from gac.config import load
from gac.demo.run import method_config
from gac.demo.task import write_task
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer

from .overhead import clock
from .record import RESULTS, copy_out, device_name, environment

TARGET = 0.05
REST, MODEL = "rest", ("generation", "forward", "backward")


class Stopwatch:
    """Seconds per part; time is attributed to the innermost running part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.running: list[str] = []
        self.since = 0.0

    def _attribute(self) -> None:
        """Count the time since the last call as time of the running part."""
        now = clock()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the time in owner.name as `part`."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **keywords: Any) -> Any:
            not_in_step = part != REST and not self.running
            # forward passes during generation count as generation
            if not_in_step or "generation" in self.running:
                return inner(*args, **keywords)
            self._attribute()
            self.running.append(part)
            try:
                return inner(*args, **keywords)
            finally:
                self._attribute()
                self.running.pop()

        setattr(owner, name, timed)


def demo_config(folder: Path, steps: int) -> TrainConfig:
    """The demo's GAC run on an untrained model, without evaluations or checkpoints."""
    write_task(folder / "task", seed=0)
    config = method_config(folder, folder / "task" / "init", "gac", 0, steps)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, random_init=True),
        eval=dataclasses.replace(config.eval, every=0),
        checkpoint_every=10**9,
    )


def measure(config: TrainConfig, warmup: int = 3) -> dict[str, float]:
    """Seconds per step of each part, without the first `warmup` steps."""
    trainer = Trainer(config, resume=False)
    watch = Stopwatch()
    watch.watch(trainer.accelerator.unwrap_model(trainer.model), "generate", "generation")
    for model in filter(None, (trainer.model, trainer.reference)):
        watch.watch(model, "forward", "forward")
    watch.watch(gac.models.head, "fused_linear_gac_loss", "loss")
    watch.watch(trainer.accelerator, "backward", "backward")
    for owner, name in (
        (trainer.optimizer, "step"),
        (trainer.optimizer, "zero_grad"),
        (torch.nn.utils, "clip_grad_norm_"),
    ):
        watch.watch(owner, name, "optimizer")
    watch.watch(trainer, "_train_step", REST)
    step, steps_done = trainer._train_step, 0

    def counted_step() -> Any:
        nonlocal steps_done
        if steps_done == warmup:
            watch.seconds.clear()
        steps_done += 1
        return step()

    trainer._train_step = counted_step
    trainer.run()
    return {part: seconds / (steps_done - warmup) for part, seconds in watch.seconds.items()}


def save(steps: int, parts: dict[str, float], outside_share: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    document = {
        "device": device_name(device),
        "date": str(datetime.date.today()),
        **environment(device),
        "steps": steps,
        "ms": {part: round(1e3 * seconds, 3) for part, seconds in parts.items()},
        "outside": round(outside_share, 4),
    }
    path = RESULTS / ("step_split.json" if device == "cpu" else "step_split-cuda.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    copy_out(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step_split", description=__doc__)
    parser.add_argument("config", type=Path, nargs="?", help="a run configuration")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.config:
            config = dataclasses.replace(
                load(TrainConfig, arguments.config), out=folder, steps=arguments.steps
            )
        else:
            config = demo_config(Path(folder), arguments.steps)
        parts = measure(config)
    total = sum(parts.values())
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"{part:12} {1e3 * seconds:8.2f} ms  {seconds / total:6.1%}")
    outside_share = 1 - sum(parts.get(part, 0) for part in (*MODEL, "loss", "optimizer")) / total
    if not arguments.config:
        save(arguments.steps, parts, outside_share)
    print(
        f"total {1e3 * total:.1f} ms; outside model, loss and optimizer {outside_share:.1%}, "
        f"target {TARGET:.0%}"
    )


if __name__ == "__main__":
    main()
