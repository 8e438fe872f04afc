"""A tiny model and demonstrations for it, for the tests of every adapter."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from gac.demo import task


def write_model(folder: Path) -> None:
    """Write a random two-layer Qwen2 with the demo's tokenizer."""
    tokenizer = task.make_tokenizer()
    config = task.model_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 48, 2
    config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def demonstrations() -> list[dict[str, str]]:
    """Twelve demonstrations of different lengths."""
    problems = task.rows(random.Random(1), ["-"] * 12, {"-": 0.3})
    return [
        {"prompt": row["prompt"], "completion": row["solution"][: 3 + 2 * (i % 3)]}
        for i, row in enumerate(problems)
    ]


def write_demonstrations(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in demonstrations()))
