"""GAC in ms-swift, on a tiny model created on the fly; takes minutes on a CPU.

    python -m examples.swift_gac [STEPS]

Runs swift's own `rlhf` command; the additions for GAC are marked with "gac".
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from swift.pipelines import rlhf_main
from swift.rewards import ORM, orms
from swift.template import TemplateMeta, register_template

from examples import toy

PLUGIN = str(Path(__file__).with_name("swift_plugin.py"))
OPTIONS = """
--rlhf_type grpo --model_type qwen2 --template toy --reward_funcs correct_fraction
--tuner_type full --torch_dtype float32 --learning_rate 1e-3 --per_device_train_batch_size 32
--num_generations 8 --gradient_accumulation_steps 2 --use_vllm false --use_cpu true
--gradient_checkpointing false --add_version false --load_args false --check_model false
--split_dataset_ratio 0 --dataset_num_proc 1 --dataloader_num_workers 0 --save_strategy no
--logging_steps 1 --report_to none
"""


class CorrectFraction(ORM):
    """Fraction of the answer's characters that are correct."""

    def __call__(self, completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [toy.reward(c, gold) for c, gold in zip(completions, answer, strict=True)]


def write(folder: Path) -> None:
    """Write the model, and write both datasets as single-turn conversations."""
    toy.write(folder)
    demos = [json.loads(line) for line in (folder / "demos.jsonl").read_text().splitlines()]
    files = {
        "prompts": [
            {"messages": [_message("user", row["prompt"])], "answer": row["answer"]}
            for row in toy.prompts(0, 512)
        ],
        "demos": [
            {"messages": [_message("user", r["prompt"]), _message("assistant", r["completion"])]}
            for r in demos
        ],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def command(folder: Path, steps: int) -> list[str]:
    """The arguments of `swift rlhf`."""
    options = {
        "external_plugins": PLUGIN,  # gac
        "chord_sft_dataset": folder / "demos.jsonl",  # gac
        "chord_sft_per_device_train_batch_size": 8,  # gac: per process and micro-batch
        "beta": 1e-30,  # gac: measures the KL for alpha without affecting training
        "model": folder / "model",
        "dataset": folder / "prompts.jsonl",
        "output_dir": folder / "out",
        "max_steps": steps,
        "max_completion_length": toy.LENGTH + 1,
    }
    named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*named, *OPTIONS.split()]


def run(steps: int, folder: Path) -> list[dict[str, float]]:
    """Train for `steps` optimizer steps and return the logged metrics."""
    orms["correct_fraction"] = CorrectFraction
    template = TemplateMeta("toy", prefix=[], prompt=["{{QUERY}}"], chat_sep=[])
    register_template(template, exist_ok=True)
    write(folder)
    rlhf_main(command(folder, steps))
    lines = (folder / "out" / "logging.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "gac/mu" in row]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for row in run(int(sys.argv[1]) if len(sys.argv) > 1 else 100, Path(folder)):
            names = ("reward", "gac/mu", "gac/rollout_loss", "gac/demo_loss")
            print(" ".join(f"{name} {row[name]:.3f}" for name in names))
