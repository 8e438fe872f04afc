"""Sampling from a policy. Legend: Q prompts, K rollouts per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.model import stop_tokens
from gac.parallel.setup import calls, in_lockstep

from .advantages import ADVANTAGES


@dataclass(frozen=True)
class RolloutConfig:
    """How the policy is sampled."""

    prompts: int = 32
    """Prompts per optimiser step, over all ranks."""
    completions: int = 8
    """Rollouts per prompt."""
    max_new_tokens: int = 1024
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; the loss of the rollouts uses the same."""
    top_p: float = 1.0
    """Nucleus; below 1 the sampling policy is not the one that the loss differentiates."""
    stop: tuple[str, ...] = ()
    """Texts of one token each that end a response, beside the tokenizer's end token."""
    reuse: int = 1
    """Optimiser steps per set of rollouts; above 1 the ratio and its clip come into play."""
    batch: int | None = None
    """Rollouts generated at once; null: all."""
    advantages: str = "std"
    """std: (r - mean) / (std + 1e-4) in the group; centered: r - mean; batch: (r - group mean)
    / (std of the batch + 1e-4)."""

    def __post_init__(self) -> None:
        for name in ("prompts", "completions", "max_new_tokens", "reuse"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: use a number >= 1")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature!r}: use a number > 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: use a number in (0, 1]")
        if self.advantages not in ADVANTAGES:
            raise ValueError(f"advantages={self.advantages!r}: use one of {', '.join(ADVANTAGES)}")


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    samples: int = 1,
    stop: Sequence[str] = (),
    batch: int | None = None,
) -> list[tuple[int, ...]]:
    """`samples` responses to each prompt, in order: token ids up to and with the stop token.

    temperature 0 decodes greedily. The model samples in evaluation mode and returns to its mode.
    """
    stops = stop_tokens(tokenizer, stop)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_p=top_p if temperature else None,
        top_k=0 if temperature else None,
        num_return_sequences=samples,
        eos_token_id=stops,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    device = next(model.parameters()).device
    per_call = max((batch or len(prompts) * samples) // samples, 1)
    was_training, defaults = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()  # its own top-k or penalties would be off-policy
    responses: list[tuple[int, ...]] = []
    parts = [prompts[i : i + per_call] for i in range(0, len(prompts), per_call)]
    for part in parts + [((stops[0],),)] * (calls(model, len(parts)) - len(parts)):
        width = max(map(len, part))
        ids = torch.full((len(part), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(part):  # padded on the left: generation continues at the end
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        out = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=settings,
            synced_gpus=in_lockstep(model),
        )
        responses += [_until(row, stops) for row in out[:, width:].tolist()]
    model.generation_config = defaults
    model.train(was_training)
    return responses[: len(prompts) * samples]


def _until(tokens: list[int], stops: list[int]) -> tuple[int, ...]:
    for i, token in enumerate(tokens):
        if token in stops:
            return tuple(tokens[: i + 1])
    return tuple(tokens)
