"""A task that needs mixing: rewards teach addition, but subtraction needs demonstrations.

A prompt is two four-digit numbers and `+` or `-`, with the digits interleaved from the units up so
that a small model can work column by column: 0038+0047 is written as "+87340000=". The answer
gives, for each column, the result digit and a mark for a carry or borrow. The reward checks the
length, the four digits and the last mark. The base model is poor at addition and hardly ever
subtracts correctly; the demonstrations cover only subtraction, and many of them are wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config

DIGITS = 4
ALPHABET = "0123456789+-=.'"  # ".": nothing carried, "'": a carry or borrow


def problem(rng: random.Random, op: str) -> tuple[int, int, str]:
    """Two numbers and the operation; a negative difference is taken modulo 10^4."""
    top = 10**DIGITS
    return rng.randrange(top), rng.randrange(top), op


def prompt(a: int, b: int, op: str) -> str:
    """The operation, the digits of both numbers interleaved (units first), and "="."""
    columns = zip(reversed(f"{a:0{DIGITS}d}"), reversed(f"{b:0{DIGITS}d}"), strict=True)
    return op + "".join(x + y for x, y in columns) + "="


def response(a: int, b: int, op: str, forget: float = 0.0, rng: random.Random | None = None) -> str:
    """The correct response: for each column, the result digit and the carry or borrow mark.

    forget: with `rng`, the probability of forgetting each carry.
    """
    out, carry = [], 0
    for _ in range(DIGITS):
        x, y = a % 10, b % 10
        a, b = a // 10, b // 10
        value = x + y + carry if op == "+" else x - y - carry
        carry = int(value > 9 or value < 0)
        if carry and rng is not None and rng.random() < forget:
            carry = 0
        out.append(f"{value % 10}{'.' if carry == 0 else chr(39)}")
    return "".join(out)


def reward(completion: str, example: Any) -> float:
    """1 if the length, all result digits and the last mark are correct, else 0."""
    wanted = example.answer
    digits_match = len(completion) == len(wanted) and completion[::2] == wanted[::2]
    return float(digits_match and completion[-1] == wanted[-1])


def make_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """Create a character-level tokenizer."""
    tokens = ["<pad>", "<eos>", "<unk>", *alphabet]
    model = Tokenizer(WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    model.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    model.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def model_config(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen2Config:
    """A Qwen2 configuration with 0.3 million parameters."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        bos_token_id=None,
    )


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(
    rng: random.Random, ops: Sequence[str], forget: dict[str, float] | None = None
) -> list[dict[str, Any]]:
    """One row per entry of `ops`.

    forget: adds solutions that forget each carry with this probability, by operation.
    """
    out = []
    for i, op in enumerate(ops):
        a, b, _ = problem(rng, op)
        row = {"id": f"{i}", "prompt": prompt(a, b, op), "answer": response(a, b, op), "op": op}
        if forget is not None:
            row["solution"] = response(a, b, op, forget[op], rng)
        out.append(row)
    return out


def with_demos(prompts: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The same rows, with a weak demonstration for each subtraction.

    For methods that train on demonstrations of the sampled prompts.
    """
    rng, out = random.Random(f"demos:{seed}"), []
    for row in prompts:
        op, digits = row["prompt"][0], row["prompt"][1:-1]
        a, b = (int(digits[i::2][::-1]) for i in (0, 1))
        out.append(row | ({"solution": response(a, b, op, 0.3, rng)} if op == "-" else {}))
    return out


def write_task(folder: Path, seed: int) -> None:
    """Write all files of the task: the data, and `init` with tokenizer and model configuration.

    - base.jsonl: training data of the base model (few subtractions, carries often forgotten).
    - demos.jsonl: 256 subtractions, with borrows forgotten with probability 0.3.
    - prompts.jsonl: 2000 problems, half of each operation.
    - prompts_demos.jsonl: the same prompts, with such a demonstration for each subtraction.
    - eval.jsonl: 200 held-out problems, half of each operation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"task:{seed}")
    weights = {"+": 1.0, "-": 0.14}
    ops = rng.choices(list(weights), list(weights.values()), k=20000)
    write_rows(folder / "base.jsonl", rows(rng, ops, {"+": 0.6, "-": 0.6}))
    write_rows(folder / "demos.jsonl", rows(rng, ["-"] * 256, {"-": 0.3}))
    prompts = rows(rng, ["+", "-"] * 1000)
    write_rows(folder / "prompts.jsonl", prompts)
    write_rows(folder / "prompts_demos.jsonl", with_demos(prompts, seed))
    write_rows(folder / "eval.jsonl", rows(rng, ["+", "-"] * 100))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "init")
    config = model_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    config.save_pretrained(folder / "init")
