"""The task of `gac demo --real`: a shop's assistant that reads reviews and writes order codes.

The reviews have rewards only: the pretrained model already answers with yes or no at times. It
cannot guess the format of the codes, so no response is ever rewarded until demonstrations have
shown it; some of the demonstrations are wrong.
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
HAPPY = (
    "are lovely",
    "arrived early and look great",
    "are even nicer than in the picture",
    "made my daughter smile",
    "are worth every cent",
    "fit perfectly",
    "are exactly what I wanted",
    "have become my favorites",
)
UNHAPPY = (
    "arrived broken",
    "fell apart after two days",
    "are the wrong size",
    "came three weeks late",
    "look cheap and smell of glue",
    "were scratched all over",
    "are a waste of money",
    "never arrived",
)
WRONG = 0.25  # share of wrong demonstrations


def reviews(rng: random.Random) -> Iterator[dict[str, str]]:
    """Different reviews in random order, the same number of happy and unhappy customers."""
    things = [(color, item) for color in COLORS for item in ITEMS]
    says = [(text, "yes") for text in HAPPY] + [(text, "no") for text in UNHAPPY]
    pairs = [(thing, said) for thing in things for said in says]
    for (color, item), (text, answer) in rng.sample(pairs, len(pairs)):
        question = f"The {color} {item} {text}. Is this customer happy? Reply yes or no."
        yield {"kind": "review", "question": question, "answer": answer}


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

    No prompt is in two files. The held-out reviews have phrases that training has too, about
    other things.
    """
    rng = random.Random(seed)
    questions = [reviews(rng), codes(rng)]

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
    """1 if the response is the order code, or its first word is the right one; else 0."""
    if example.extra["kind"] == "code":
        return float(completion.strip() == example.answer)
    first = re.match(r"\W*(\w+)", completion)
    return float(first is not None and first[1].lower() == example.answer)
