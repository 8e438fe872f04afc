"""The settings of `research.validate_signals`: the demo's task, and two with a pretrained model."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gac.config import dump, load
from gac.demo import real, real_task
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


def real_scenarios(out: Path, model: str, steps: int) -> dict[str, TrainConfig]:
    """Configurations of runs of a pretrained model by name; `choices` needs $GAC_DATA.

    sums: the task of `gac demo --real`, sums that the model half knows and codes that only
    demonstrations teach. choices: MMLU-Pro, answered with the letter alone.
    """
    real_task.write_task(out / "task")
    configs = {"sums": real.config(out, model, "grpo", steps)}
    if "GAC_DATA" in os.environ:
        base = configs["sums"]
        data = {
            "prompts": f"{os.environ['GAC_DATA']}/mmlu_pro.jsonl.gz",
            "demo_field": "answer",
            "template": "{prompt}\n{choices}\nAnswer with the letter only.",
            "max_prompt_tokens": 128,
        }
        # a study needs held-out rows; this one does not evaluate them
        held_out = {"data": data | {"demo_field": None, "limit": 8}, "max_completion_length": 4}
        settings = dump(base) | {"data": data, "reward": "choice", "eval": held_out}
        settings["rollouts"]["max_completion_length"] = 4
        configs["choices"] = load(TrainConfig, settings)
    return configs
