"""The rollouts of one step: prompts, responses, rewards, advantages, rows to learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .batch import Row
from .data import Example
from .rollouts import RolloutConfig, generate, group_advantages


@dataclass
class Rollouts:
    """What one rank sampled for one optimiser step, or for several when rollouts are reused."""

    rows: list[Row]
    """The rollouts that got a reward; `Row.index` is the place in this list."""
    rewards: list[float]
    """Reward of each row."""
    old_logps: list[Tensor] = field(default_factory=list)
    """Log-probs of the sampling policy, one tensor of response tokens per row; empty: on-policy."""


def place(logps: Sequence[Tensor], rows: Sequence[Row], targets: Tensor) -> Tensor:
    """[B, T]: each row's response log-probs where `targets` has its response tokens."""
    out = torch.zeros(targets.shape)
    for b, (row, values) in enumerate(zip(rows, logps, strict=True)):
        out[b, max(row.start, 1) - 1 : len(row.ids) - 1] = values
    return out.to(targets.device)


class Sampler:
    """Calls the model and the reward: examples in, rollouts out."""

    def __init__(
        self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, reward: Any
    ) -> None:
        self.config, self.tokenizer, self.reward = config, tokenizer, reward

    def __call__(self, model: nn.Module, examples: Sequence[Example]) -> Rollouts:
        """K rollouts for each of Q examples; a rollout whose reward was dropped is left out."""
        config = self.config
        responses = generate(
            model, self.tokenizer, [e.prompt for e in examples],
            max_new_tokens=config.max_new_tokens, temperature=config.temperature,
            top_p=config.top_p, samples=config.completions, stop=config.stop, batch=config.batch,
        )  # fmt: skip
        repeated = [e for e in examples for _ in range(config.completions)]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        scores = [math.nan if s is None else s for s in self.reward(texts, repeated)]
        table = torch.tensor(scores, dtype=torch.float64).view(len(examples), config.completions)
        advantages = group_advantages(table, config.advantages).flatten().tolist()
        rows: list[Row] = []
        for example, response, score, advantage in zip(
            repeated, responses, scores, advantages, strict=True
        ):
            if not math.isnan(score):
                ids = example.prompt + response
                rows.append(Row(ids, len(example.prompt), False, advantage, len(rows)))
        return Rollouts(rows, [s for s in scores if not math.isnan(s)])
