"""Accuracy of a model on held-out prompts, by the run's own reward."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.data import DataConfig, Example, load_prompts
from gac.errors import ConfigError, refusals_are
from gac.model import ModelConfig, load_model, load_tokenizer
from gac.parallel.collectives import gather, rank, ranks
from gac.rewards import build_reward, in_use
from gac.rollouts.generation import generate


@dataclass(frozen=True)
class EvalSettings:
    """How a model is evaluated."""

    data: DataConfig = DataConfig()
    """Prompts and gold answers; `data.prompts` null: no evaluation."""
    every: int = 0
    """Optimiser steps between evaluations during training; 0: only before the first step, which is
    recorded as step 0, and after the last."""
    samples: int = 1
    """Responses per prompt; accuracy is their mean (avg@k)."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    """Nucleus of the sampling."""
    max_new_tokens: int = 1024
    """Longest response, in tokens."""
    stop: tuple[str, ...] = ()
    """Texts of one token each that end a response, beside the end token."""
    batch: int | None = 64
    """Responses generated at once; null: all."""
    split_field: str | None = None
    """A field of the rows: accuracy is also given for each of its values."""


@dataclass(frozen=True)
class EvalConfig:
    """`gac eval`: a model, a data set and a reward."""

    model: ModelConfig = ModelConfig()
    """The model to evaluate."""
    settings: EvalSettings = EvalSettings()
    """Data and sampling."""
    reward: Any = "math"
    """As in training: a name, a mapping, or package.module:function."""
    seed: int = 0
    """Seed of the sampling."""


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    reward: Any,
    settings: EvalSettings,
    seed: int,
) -> dict[str, float]:
    """accuracy, accuracy/<split>, response_length, seconds. Ranks share the prompts.

    Sampling draws from its own seed and leaves the global generators as they were.
    """
    started = time.perf_counter()
    mine = examples[rank() :: ranks()]
    _check_split(examples, settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed * ranks() + rank())
        responses = generate(
            model, tokenizer, [e.prompt for e in mine],
            max_new_tokens=settings.max_new_tokens, temperature=settings.temperature,
            top_p=settings.top_p, samples=settings.samples, stop=settings.stop,
            batch=settings.batch,
        )  # fmt: skip
    repeated = [e for e in mine for _ in range(settings.samples)]
    texts = tokenizer.batch_decode([list(r) for r in responses], skip_special_tokens=True)
    scores = reward(texts, repeated)
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for example, response, score in zip(repeated, responses, scores, strict=True):
        if score is None:
            continue
        names = ["accuracy"]
        if settings.split_field:
            names.append(f"accuracy/{example.extra[settings.split_field]}")
        for name, value in [*((n, score) for n in names), ("response_length", len(response))]:
            found[name][0] += value
            found[name][1] += 1
    sums = _added(gather(dict(found)))
    out = {name: total / count for name, (total, count) in sorted(sums.items())}
    return {**out, "seconds": time.perf_counter() - started}


def _check_split(examples: Sequence[Example], settings: EvalSettings) -> None:
    name = settings.split_field
    bad = next((e for e in examples if name and name not in e.extra), None)
    if bad is not None:
        raise ConfigError(
            f"split_field={name!r} is not among the further fields of row {bad.id!r}: "
            f"{', '.join(bad.extra) or 'none'}"
        )


def _added(everyone: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Sum and count of each name over the ranks, some of which may not have met it."""
    out: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for found in everyone:
        for name, (value, count) in found.items():
            out[name][0] += value
            out[name][1] += count
    return out


def evaluate_model(config: EvalConfig) -> dict[str, float]:
    """Load a model and evaluate it: what `gac eval` does."""
    with refusals_are(ConfigError):
        reward = build_reward(config.reward)
        tokenizer = load_tokenizer(config.model)
        examples = load_prompts(config.settings.data, tokenizer)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(config.model, config.seed).to(device)
    with in_use(reward):
        return evaluate(model, tokenizer, examples, reward, config.settings, config.seed)
