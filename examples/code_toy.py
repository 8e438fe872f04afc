"""The code reward on a tiny model: `python examples/code_toy.py` (Linux; takes minutes on a CPU).

A randomly initialized model with 0.2 million parameters learns to write the body of `def f(a, b):`
from a sentence such as "twice a minus b squared". Half of the demonstrations use a wrong operator;
hidden tests in the sandbox decide which programs are correct. Additional arguments are passed to
`gac train`, e.g. `--set method=sft out=runs/code_toy/sft`.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, PreTrainedTokenizerFast

from gac import cli

CONFIG = Path(__file__).with_suffix(".yaml")
TASK = Path("runs/code_toy/task")  # must match the configuration
OPERANDS = {
    "a": "a",
    "b": "b",
    "twice a": "2*a",
    "twice b": "2*b",
    "thrice a": "3*a",
    "thrice b": "3*b",
    "a squared": "a*a",
    "b squared": "b*b",
    "two": "2",
    "three": "3",
    "five": "5",
    "seven": "7",
}
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
HEAD, RETURN = 'def f(a, b):\n    """{}"""\n', "    return "
TESTED = ((3, 5), (7, 2), (-4, 6), (0, 9))  # test inputs (a, b)
HELD_OUT = 82  # number of held-out sentences, of 432


def row(left: str, operator: str, right: str, rng: random.Random) -> dict[str, Any]:
    """One data row: a sentence, its program and tests, and a demonstration.

    About half of the demonstrations are wrong.
    """
    other = rng.choice([o for o in OPERATORS if o != operator])
    demo_operator = other if rng.random() < 0.5 else operator
    expression = OPERANDS[left] + OPERATORS[operator] + OPERANDS[right]
    # safe: the expression is built from the constants above, not by a model
    results = [eval(expression, {"a": a, "b": b}) for a, b in TESTED]
    sentence = f"{left} {operator} {right}"
    return {
        "id": sentence,
        "prompt": sentence,
        "operator": operator,
        "answer": RETURN + expression,
        "solution": RETURN + OPERANDS[left] + OPERATORS[demo_operator] + OPERANDS[right],
        "code": HEAD.format(sentence),  # the prompt that the answer continues
        "entry_point": "f",
        "tests": [f"assert f({a}, {b}) == {r}" for (a, b), r in zip(TESTED, results, strict=True)],
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word, for each sign and for "    return "."""
    words = sorted({w for text in (*OPERANDS, *OPERATORS) for w in text.split()})
    tokens = ["<pad>", "<eos>", "<unk>", *" =", *words, RETURN, *OPERATORS.values(), *"2357"]
    model = Tokenizer(WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    model.pre_tokenizer = Split(Regex(f"{RETURN}|[a-z]+|."), "isolated")
    model.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def write_task(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl, held_out.jsonl, and the model's configuration and tokenizer (init/)."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"code toy:{seed}")
    sentences = list(itertools.product(OPERANDS, OPERATORS, OPERANDS))
    rng.shuffle(sentences)
    rows = [row(*sentence, rng) for sentence in sentences]
    for name, part in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        text = "".join(json.dumps(fields) + "\n" for fields in part)
        (folder / f"{name}.jsonl").write_text(text)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "init")
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    ).save_pretrained(folder / "init")


def main(arguments: Sequence[str]) -> int:
    """Write the task and train; returns the exit code."""
    write_task(TASK)
    return cli.main(["train", str(CONFIG), *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
