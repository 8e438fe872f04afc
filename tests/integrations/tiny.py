"""A tiny model and demonstrations for it, for the tests of every adapter."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gac.demo import task
from tests.tiny import SMALL


def write_model(folder: Path, model_type: str = "qwen2", **changes: Any) -> None:
    """Write a random two-layer model with the demo's tokenizer; `changes` are configuration keys.

    The default is a Qwen2 with a tied head.
    """
    tokenizer = task.make_tokenizer()
    values = SMALL | {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(values | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def demonstrations() -> list[dict[str, str]]:
    """Twelve demonstrations of different lengths."""
    return [
        {"prompt": row["prompt"], "completion": row["solution"][: 3 + 2 * (i % 3)]}
        for i, row in enumerate(task.rows(random.Random(1), ["-"] * 12, {"-": 0.3}))
    ]


def write_demonstrations(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in demonstrations()))
