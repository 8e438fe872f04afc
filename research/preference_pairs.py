"""Writes a fixed set of preference pairs from a model's responses, as the paper's DPO and IPO use.

Usage: `python -m research.preference_pairs examples/eval/gsm8k_pairs.yaml runs/pairs.jsonl`. The
first file is a configuration of `gac eval` with one entry in `tasks`: the prompts of the training
set, several samples, and the model after SFT. Each prompt with a correct and an incorrect response
becomes a row with all fields of its data and with `chosen` and `rejected` (arXiv 2605.26184,
appendix on baselines: correct and incorrect solutions of the same prompt). Responses that the
length limit cut off are left out. An interrupted command continues when it is rerun.
examples/gsm8k_dpo.yaml trains on the pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gac.config import load
from gac.data import Example, load_prompts
from gac.evaluation.config import EvalConfig
from gac.evaluation.suite import read_samples, run_suite
from gac.evaluation.task import Answer
from gac.models.causal_lm import load_tokenizer


def pairs(examples: Sequence[Example], answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    """The rows of all prompts with a complete response of each kind; the first ones count."""
    found: dict[int, dict[str, str]] = {}
    for answer in answers:
        if not answer.truncated and answer.score is not None:
            kind = "chosen" if answer.score >= 1 else "rejected"
            found.setdefault(answer.number, {}).setdefault(kind, answer.response)
    for number, pair in sorted(found.items()):
        if len(pair) == 2:
            yield {**examples[number].extra, **pair}


def main(argv: Sequence[str] | None = None) -> int:
    """Sample the missing responses and write the pairs; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m research.preference_pairs", description=__doc__
    )
    parser.add_argument("config", type=Path, help="of `gac eval`, with one task")
    parser.add_argument("pairs", type=Path, help="the file to write, .jsonl")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other keys")
    args = parser.parse_args(argv)
    config = load(EvalConfig, args.config, args.set)
    if len(config.tasks) != 1:
        parser.error(f"{args.config}: tasks has {len(config.tasks)} entries: give one")
    ((name, task),) = config.tasks.items()
    run_suite(config)
    examples = load_prompts(task.data, load_tokenizer(config.model), demos=False)
    rows = [*pairs(examples, read_samples(Path(config.out or "evals"))[name])]
    if not rows:
        print(f"no pairs of {len(examples)} prompts: none has a correct and an incorrect response")
        return 1
    args.pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {args.pairs}: {len(rows)} pairs of {len(examples)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
