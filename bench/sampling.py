"""Tokens per second of sampling from a pretrained model: GAC beside transformers' own engines.

Usage: python -m bench.sampling [--dtype bfloat16] [--samples 4] [--threads 1] [--rounds 5]

All engines get the same questions, those of `gac demo --real`, and sample 32 completions at
temperature 1, each until the end of its turn or the limit. They alternate within a run, after a
warm-up. GAC samples from the model that it trains, whose weights are float32 in both dtypes;
transformers loads the model in the given one. Times are processor times of one thread, or wall
times of several. A run replaces its own rows in the results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from gac.demo.real_model import fetch_model
from gac.demo.real_task import codes, sums
from gac.evaluation.table import markdown_table
from gac.models.causal_lm import load_tokenizer, make_model
from gac.models.config import ModelConfig
from gac.rollouts.config import PagedConfig, RolloutConfig
from gac.rollouts.engines import CPU_BATCH, Engine
from tools.origin import origin
from tools.pages import BENCHMARKS, fill

from .record import device_name
from .settings import DRY_RUN, RESULTS, tiny

ROWS, LENGTH = tiny(32, 4), tiny(96, 4)
OURS, STATIC, CONTINUOUS = (
    "GAC, `generate`",
    "transformers, `generate`",
    "transformers, continuous batching",
)
Sampler = Callable[[], Sequence[Sequence[int]]]


def prompts(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """Token ids of the questions, half sums and half orders, with the model's chat template."""
    rng = random.Random(0)
    pairs = zip(sums(rng), codes(rng), strict=False)
    questions = itertools.islice(itertools.chain.from_iterable(pairs), count)
    return [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q["question"]}], add_generation_prompt=True
            )["input_ids"]
        )
        for q in questions
    ]


def samplers(path: str, dtype: str, samples: int) -> dict[str, Sampler]:
    """What is compared: each call returns the new tokens of all completions."""
    settings = ModelConfig(path=path, dtype=dtype)
    tokenizer = load_tokenizer(settings)
    texts = prompts(tokenizer, ROWS // samples)
    config = RolloutConfig(max_completion_length=LENGTH)
    engine = Engine(config, tokenizer).load(make_model(settings, 0, training=True))
    plain, paged = (
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **options).eval()
        for options in ({}, {"attn_implementation": "paged|sdpa"})
    )
    generation = GenerationConfig(
        max_new_tokens=LENGTH,
        do_sample=True,
        top_k=0,
        num_return_sequences=samples,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    width = max(map(len, texts))
    ids = torch.tensor([(tokenizer.pad_token_id,) * (width - len(t)) + t for t in texts])
    mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts])
    size = PagedConfig().block_size
    blocks = samples * sum(-(-(len(text) + LENGTH) // size) for text in texts)
    pages = ContinuousBatchingConfig(max_batch_tokens=CPU_BATCH, num_blocks=blocks, block_size=size)

    def static() -> Sequence[Sequence[int]]:
        with torch.no_grad():
            out = plain.generate(ids, attention_mask=mask, generation_config=generation)
        return [cut(row, tokenizer.eos_token_id) for row in out[:, width:].tolist()]

    def continuous() -> Sequence[Sequence[int]]:
        results = paged.generate_batch(
            [list(text) for text in texts],
            generation_config=generation,
            continuous_batching_config=pages,
        )
        return [result.generated_tokens for result in results.values()]

    return {OURS: lambda: engine.generate(texts, samples), STATIC: static, CONTINUOUS: continuous}


def cut(row: list[int], end: int) -> list[int]:
    """The tokens up to the end of the turn."""
    return row[: row.index(end) + 1] if end in row else row


def measure(path: str, dtype: str, samples: int, rounds: int) -> list[dict[str, Any]]:
    """One row per engine."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    engines = samplers(path, dtype, samples)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    tokens = dict.fromkeys(engines, 0)
    for number in range(rounds + 1):
        for name, sample in engines.items():
            torch.manual_seed(number)
            start = clock()
            completions = sample()
            assert len(completions) == ROWS
            count = sum(map(len, completions))
            if number:
                speeds[name].append(count / (clock() - start))
                tokens[name] += count
    return [
        {
            **origin(),
            "engine": name,
            "dtype": dtype,
            "samples": samples,
            "threads": torch.get_num_threads(),
            "rounds": rounds,
            "tokens": tokens[name],
            "tokens_per_second": statistics.median(speeds[name]),
            # of each round, because other work on the machine slows all engines of a round
            "speedups": [ours / own for ours, own in zip(speeds[OURS], speeds[name], strict=True)],
        }
        for name in engines
    ]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/benchmarks.md: one line per case."""
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = (row["dtype"], row["samples"], row["threads"])
        cases.setdefault(case, {})[row["engine"]] = row

    def ratio(row: dict[str, Any]) -> str:
        ratios = row["speedups"]
        return f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"

    head = ("dtype", "samples per prompt", "threads", "tokens per second", "over `generate`")
    return markdown_table(
        (*head, "over continuous batching"),
        [
            (
                *map(str, case),
                f"{engines[OURS]['tokens_per_second']:.0f}",
                ratio(engines[STATIC]),
                ratio(engines[CONTINUOUS]),
            )
            for case, engines in sorted(cases.items())
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--samples", type=int, default=tiny(4, 2), help="completions per prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=tiny(5, 1))
    parser.add_argument("--model", type=Path, help="a folder; default: the model of `make real`")
    parser.add_argument("--out", type=Path, default=RESULTS / "sampling.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = str(options.model or fetch_model())
    measured = measure(folder, options.dtype, options.samples, options.rounds)
    torch.set_num_threads(1)  # the device's name has the number of threads
    device = device_name("cpu").removesuffix(" 1 threads")
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    key = ("dtype", "samples", "threads")
    kept = [row for row in rows if any(row[k] != measured[0][k] for k in key)]
    document = {"device": device, "torch": torch.__version__, "rows": [*kept, *measured]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(markdown(measured))
    if not DRY_RUN and options.out == RESULTS / "sampling.json":
        fill(BENCHMARKS, "sampling", f"{device}:\n\n{markdown(document['rows'])}")


if __name__ == "__main__":
    main()
