"""The engines that draw rollouts, behind one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .generation import Draws, Responses, RolloutConfig, generate
from .paged import generate_paged


def sample(
    config: RolloutConfig, model: Any, tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, ...]], samples: int,
) -> Responses:  # fmt: skip
    """`samples` responses to each prompt, in order, by the engine that `config` names."""
    draws = Draws(config.max_new_tokens, config.temperature, config.top_p, samples, config.stop)
    if config.engine == "paged":
        return generate_paged(model, tokenizer, prompts, draws, config.paged)
    return generate(model, tokenizer, prompts, batch=config.batch,
                    batch_tokens=config.batch_tokens, **draws._asdict())  # fmt: skip
