"""The task of `gac demo --real`: a shop's assistant that adds numbers and writes order codes.

The sums have rewards only: the pretrained model solves some of them. It cannot guess the format of
the codes, so no response is ever rewarded until demonstrations have shown it; some of the
demonstrations are wrong.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gac.config import save_text

SYSTEM = "Be brief."  # shorter than the model's own
COLORS = ("amber", "blue", "green", "ivory", "pink", "purple", "red", "white")
ITEMS = ("bags", "chairs", "doors", "hats", "lamps", "mugs", "tables", "vases")
NUMBERS = range(10, 30)
SOLD = range(2, 30)
WRONG = 0.25  # share of wrong demonstrations


def sums(rng: random.Random) -> Iterator[dict[str, str]]:
    """Different sums of two numbers in random order."""
    pairs = [(a, b) for a in SOLD for b in SOLD]
    for a, b in rng.sample(pairs, len(pairs)):
        question = f"We sold {a} + {b} tickets. How many is that? Reply with the number only."
        yield {"kind": "sum", "question": question, "answer": str(a + b)}


def codes(rng: random.Random) -> Iterator[dict[str, str]]:
    """Different orders in random order, with the shop's code for each."""
    orders = [(n, color, item) for n in NUMBERS for color in COLORS for item in ITEMS]
    for n, color, item in rng.sample(orders, len(orders)):
        question = f"A customer orders {n} {color} {item}. Write the order code."
        yield {"kind": "code", "question": question, "answer": f"{item}-{color}-{n}"}


def mistake(answer: str, rng: random.Random) -> str:
    """A wrong code: color and item swapped, or another number."""
    item, color, number = answer.split("-")
    if rng.random() < 0.5:
        return f"{color}-{item}-{number}"
    return f"{item}-{color}-{rng.choice([n for n in NUMBERS if n != int(number)])}"


def row(fields: dict[str, str]) -> dict[str, Any]:
    """A row of the data: the prompt as messages, the answer and the kind of prompt."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": fields["question"]},
    ]
    return {"prompt": messages, "answer": fields["answer"], "kind": fields["kind"]}


def write_task(
    folder: Path, seed: int = 0, prompts: int = 300, demos: int = 200, held_out: int = 100
) -> None:
    """Write prompts.jsonl and eval.jsonl, with both kinds in halves, and demos.jsonl, all codes.

    No prompt is in two files.
    """
    rng = random.Random(seed)
    questions = [sums(rng), codes(rng)]

    def take(count: int, kinds: list[Iterator[dict[str, str]]]) -> list[dict[str, Any]]:
        return [row(next(kind)) for _ in range(count // len(kinds)) for kind in kinds]

    shown = take(demos, questions[1:])
    for fields in shown:
        answer = fields["answer"]
        fields["solution"] = mistake(answer, rng) if rng.random() < WRONG else answer
    parts = {"prompts": take(prompts, questions), "demos": shown, "eval": take(held_out, questions)}
    for name, rows in parts.items():
        save_text(folder / f"{name}.jsonl", "".join(json.dumps(r) + "\n" for r in rows))


def reward(completion: str, example: Any) -> float:
    """1 if the response is the order code, or its last number is the sum; else 0.

    A response that the limit cut off may end in a part of a number.
    """
    if example.truncated:
        return 0.0
    if example.extra["kind"] == "code":
        return float(completion.strip() == example.answer)
    return float(re.findall(r"\d+", completion)[-1:] == [example.answer])
