"""Helpers for training runs of milliseconds: a random Qwen2 with the demo's tokenizer and data."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gac.config import load
from gac.data import Example
from gac.demo.task import make_tokenizer, model_config, rows, write_rows
from gac.models.causal_lm import load_model
from gac.models.config import ModelConfig
from gac.rewards.base import RowReward
from gac.train_config import TrainConfig

# keys of metrics.jsonl that measure wall-clock time
TIMING_KEYS = (
    "seconds",
    "reward_seconds",
    "sampling_seconds",
    "sampling_share",
    "completions_per_second",
    "tokens_per_second",
)

# `rollouts` of a run that samples in every third step
REUSED = {"num_prompts": 4, "num_generations": 4, "max_completion_length": 5, "num_iterations": 3}

# the sizes of a model of any family, as keys of its configuration
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "max_position_embeddings": 64,
}


def write_tiny(folder: Path, *, prompts: int = 16, demos: int = 12, layers: int = 1) -> Path:
    """Write a model configuration, tokenizer and data to `folder`, and return it."""
    import random

    rng = random.Random(0)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "init")
    config = model_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 48, layers
    config.layer_types = None
    config.save_pretrained(folder / "init")
    forget = dict.fromkeys("+-", 0.3)
    write_rows(folder / "prompts.jsonl", rows(rng, ["+", "-"] * (prompts // 2), forget))
    write_rows(folder / "demos.jsonl", rows(rng, ["-"] * demos, forget))
    write_rows(folder / "eval.jsonl", rows(rng, ["+", "-"] * 4))
    return folder


def write_teacher(task: Path, folder: Path) -> Path:
    """Write a teacher with the task's tokenizer and other random weights; returns its folder."""
    from transformers import AutoTokenizer

    path = str(task / "init")
    load_model(ModelConfig(path=path, random_init=True), seed=7).save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


def with_config(task: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the task whose model has another configuration."""
    shutil.copytree(task, folder)
    path = folder / "init" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def tiny_config(folder: Path, out: Path, **changes: Any) -> TrainConfig:
    """A run of a few steps; keywords replace top-level keys of the configuration."""
    return load(
        TrainConfig,
        {
            "out": str(out),
            "model": {"path": str(folder / "init"), "random_init": True},
            "data": {
                "prompts": str(folder / "prompts.jsonl"),
                "demos": str(folder / "demos.jsonl"),
            },
            "reward": "tests.tiny:digit_reward",
            "rollouts": {"num_prompts": 4, "num_generations": 4, "max_completion_length": 5},
            # all rows in one forward
            "micro_batch_size": None if "max_tokens_per_micro_batch" in changes else 1000,
            "eval": {
                "data": {"prompts": str(folder / "eval.jsonl")},
                "max_completion_length": 5,
                "split_field": "op",
            },
            "optim": {"lr": 1e-3, "warmup_steps": 1, "max_grad_norm": 0},
            "steps": 4,
            "demo_batch_size": 4,
            "checkpoint_every": 100,
            "export": False,
            **changes,
        },
    )


def write_bpe_model(folder: Path, texts: Iterable[str]) -> None:
    """Write a byte-level BPE tokenizer trained on `texts`, and a tiny Qwen2 configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    ).save_pretrained(folder)


def digit_reward(completion: str, example: Any) -> float:
    """The fraction of characters that are digits: neither 0 nor 1 on average for a random model."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


class CountedDigits(RowReward):
    """`digit_reward`, with a counter of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def score(self, completion: str, example: Example) -> float:
        self.calls += 1
        return digit_reward(completion, example)

    def counts(self) -> dict[str, int]:
        return {"calls": self.calls, "never": 0}


def take_steps(trainer: Any, count: int) -> list[dict[str, Any]]:
    """Run `count` steps, without evaluations and checkpoints; return the metrics of each."""
    rows = []
    for _ in range(count):
        rows.append(trainer._train_step())
        trainer.step += 1
    return rows


def metrics(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without the timing metrics."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING_KEYS} for line in lines]
