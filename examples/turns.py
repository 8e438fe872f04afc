"""Rollouts of several turns: a guessing game and a calculator, with a tiny model on a CPU.

    python examples/turns.py guess        # an environment answers the first guess
    python examples/turns.py calculate    # a tool computes the sum; its result has no loss

Each trains for less than a minute and prints the accuracy before and after.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gac.config import load
from gac.data import Example
from gac.demo.task import make_tokenizer, model_config
from gac.rollouts import Rollout
from gac.train_config import TrainConfig
from gac.training.trainer import train

ALPHABET = "0123456+=?<>c"  # "c" calls the calculator


def guess(prompts: Sequence[Example], engine: Any) -> list[Rollout]:
    """Find a number from 1 to 3; after the first guess, the environment says < or >."""
    words = engine.tokenizer
    first = engine.generate([p.prompt for p in prompts], max_completion_length=1)
    hints = []
    for prompt, ids in zip(prompts, first, strict=True):
        text = words.decode(list(ids))
        hints.append("<" if text.isdigit() and prompt.answer < text else ">")
    hint_ids = [tuple(words.encode(hint)) for hint in hints]
    contexts = [p.prompt + a + h for p, a, h in zip(prompts, first, hint_ids, strict=True)]
    second = engine.generate(contexts, max_completion_length=1)
    rollouts = []
    for prompt, a, hint, b in zip(prompts, first, hint_ids, second, strict=True):
        if words.decode(list(a)) == prompt.answer:  # won with the first guess
            rollouts.append(Rollout(prompt.prompt, a, [1], reward=1.0))
            continue
        won = words.decode(list(b)) == prompt.answer
        rollouts.append(Rollout(prompt.prompt, a + hint + b, [1, 0, 1], reward=float(won)))
    return rollouts


def calculate(prompts: Sequence[Example], engine: Any) -> list[Rollout]:
    """Add two numbers; writing "c" calls a calculator, whose result the model can read."""
    words = engine.tokenizer
    first = engine.generate([p.prompt for p in prompts], max_completion_length=1)
    called = [i for i, ids in enumerate(first) if words.decode(list(ids)) == "c"]
    results = {}
    for i in called:
        a, b = prompts[i].prompt_text.rstrip("=").split("+")
        results[i] = tuple(words.encode(str(int(a) + int(b))))
    contexts = [prompts[i].prompt + first[i] + results[i] for i in called]
    second = engine.generate(contexts, max_completion_length=1)
    answers = dict(zip(called, second, strict=True))
    rollouts = []
    for i, (prompt, ids) in enumerate(zip(prompts, first, strict=True)):
        result, answer = results.get(i, ()), answers.get(i, ())
        mask = [1] * len(ids) + [0] * len(result) + [1] * len(answer)
        last = words.decode(list(answer or ids))
        rollouts.append(Rollout(prompt.prompt, ids + result + answer, mask, extra={"last": last}))
    return rollouts


def last_is_right(completion: str, example: Example) -> float:
    """The reward of `calculate`: whether the last token is the answer."""
    return float(example.extra["last"] == example.answer)


def config(task: str, folder: Path) -> TrainConfig:
    """Write the data and a random model to `folder`; return the configuration of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    words = make_tokenizer(ALPHABET)
    model = model_config(len(words), words.pad_token_id, words.eos_token_id)
    model.hidden_size, model.intermediate_size, model.num_hidden_layers = 32, 64, 2
    model.layer_types = None
    for part in (words, model):
        part.save_pretrained(folder / "init")
    rng = random.Random(0)
    rows: list[dict[str, str]] = []
    for _ in range(240):
        a, b = rng.randrange(1, 4), rng.randrange(0, 4)
        sums = {"prompt": f"{a}+{b}=", "answer": f"{a + b}"}
        rows.append({"prompt": "?", "answer": f"{a}"} if task == "guess" else sums)
    for name, part in (("train", rows[:200]), ("test", rows[200:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return load(
        TrainConfig,
        {
            "out": str(folder / "run"),
            "model": {"path": str(folder / "init"), "random_init": True},
            "method": "grpo",
            "data": {"prompts": str(folder / "train.jsonl")},
            "reward": f"{__file__}:last_is_right",
            "rollouts": {
                "function": f"{__file__}:{task}",
                "num_prompts": 16,
                "num_generations": 16,
                "max_completion_length": 4,
            },
            "eval": {
                "data": {"prompts": str(folder / "test.jsonl")},
                "max_completion_length": 4,
            },
            "optim": {"lr": 3e-3, "warmup_steps": 1},
            "steps": 60,
            "export": False,
        },
    )


def main(task: str, folder: Path) -> tuple[float, float]:
    """Train, and return the accuracy before and after."""
    out = train(config(task, folder))
    lines = (out / "eval.jsonl").read_text().splitlines()
    accuracies = [json.loads(line)["accuracy"] for line in (lines[0], lines[-1])]
    print(f"accuracy before {accuracies[0]:.2f}, after {accuracies[1]:.2f}")
    return accuracies[0], accuracies[1]


if __name__ == "__main__":
    main(sys.argv[1], Path(*sys.argv[2:] or ["runs", sys.argv[1]]))
