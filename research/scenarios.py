"""The two settings of `research.validate_signals`: the demo's, and demonstrations that turn bad."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gac.demo.run import make_base, method_config
from gac.demo.task import write_rows, write_task
from gac.train_config import TrainConfig

CHANGE = 0.4  # fraction of a run after which the demonstrations turn bad


def wrong(demos: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The same demonstrations with every digit of the solution replaced by a random one."""
    rng = random.Random(f"wrong:{seed}")

    def scramble(text: str) -> str:
        return "".join(rng.choice("0123456789") if c.isdigit() else c for c in text)

    return [row | {"solution": scramble(row["solution"])} for row in demos]


def write_scenarios(out: Path, steps: int, base_steps: int = 400) -> dict[str, TrainConfig]:
    """Write the data, train the missing base model and return the configurations by name."""
    task = out / "task"
    if not (task / "init" / "config.json").exists():
        write_task(task, seed=0)
    demos = [json.loads(line) for line in (task / "demos.jsonl").read_text().splitlines()]
    later = [row | {"from_step": int(CHANGE * steps)} for row in wrong(demos, seed=0)]
    write_rows(task / "spoil.jsonl", [*demos, *later])
    config = dataclasses.replace(
        method_config(out, make_base(out, base_steps), "grpo", 0, steps),
        monitor_kl_every=0,
        checkpoint_every=steps // 4,
        keep_checkpoints=1,
    )
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, every=steps // 4))
    spoiled = dataclasses.replace(
        config.data, demos=str(task / "spoil.jsonl"), order="tests.changing:Phases"
    )
    return {"base": config, "spoil": dataclasses.replace(config, data=spoiled)}
