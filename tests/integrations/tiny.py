"""A tiny model and demonstrations for it, for the tests of every adapter."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from gac.demo.task import model_config, rows, tokenizer


def write_model(folder: Path) -> None:
    """Write a random two-layer Qwen2 with the demo's tokenizer."""
    words = tokenizer()
    config = model_config(len(words), words.pad_token_id, words.eos_token_id)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 48, 2
    config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)


def demonstrations() -> list[dict[str, str]]:
    """Twelve demonstrations of different lengths."""
    drawn = rows(random.Random(1), ["-"] * 12, {"-": 0.3})
    cut = [row["solution"][: 3 + 2 * (i % 3)] for i, row in enumerate(drawn)]
    return [{"prompt": r["prompt"], "completion": c} for r, c in zip(drawn, cut, strict=True)]


def write_demonstrations(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in demonstrations()))
