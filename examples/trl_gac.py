"""GAC in TRL, on a tiny model created on the fly; takes minutes on a CPU.

    python -m examples.trl_gac [STEPS]

The differences from a plain GRPOTrainer script are marked with "gac".
"""

from __future__ import annotations

import random
import sys
import tempfile
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from gac import ControllerConfig  # gac
from gac.demo import task
from gac.integrations.trl import GACTrainer  # gac


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Fraction of the answer's characters that are correct."""
    pairs = zip(completions, answer, strict=True)
    return [sum(a == b for a, b in zip(c, gold, strict=False)) / len(gold) for c, gold in pairs]


def run(steps: int, out: str) -> list[dict[str, float]]:
    """Train for `steps` optimizer steps and return the logged metrics."""
    tokenizer = task.make_tokenizer()
    config = task.model_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    model = AutoModelForCausalLM.from_config(config)
    rng = random.Random(0)
    prompts = Dataset.from_list(task.rows(rng, ["+", "-"] * 500))
    problems = task.rows(rng, ["-"] * 256, {"-": 0.3})
    demos = Dataset.from_list(
        [{"prompt": row["prompt"], "completion": row["solution"]} for row in problems]
    )
    args = GRPOConfig(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=16,
        num_generations=8,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
    )
    trainer = GACTrainer(  # gac: was GRPOTrainer
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=tokenizer,
        demo_dataset=demos,  # gac: columns prompt and completion, or messages
        demo_batch=16,  # gac: demonstrations per optimizer step
        controller=ControllerConfig(),  # gac: or e.g. gac.methods.CHORD()
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "gac/mu" in row]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for row in run(int(sys.argv[1]) if len(sys.argv) > 1 else 100, folder):
            names = ("reward", "gac/mu", "gac/rollout_loss", "gac/demo_loss")
            print(" ".join(f"{name} {row[name]:.3f}" for name in names))
