"""Checks of a run's inputs against its model and method, before the model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.data import Example
from gac.errors import ConfigError
from gac.models.config import ModelConfig
from gac.models.weights import base_folder

logger = logging.getLogger(__name__)


def check_tokens(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, examples: Iterable[Example]
) -> None:
    """Raise ConfigError if a token of the data is not in the model's vocabulary."""
    size = _text_config(config).vocab_size
    special = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    largest = max(special)
    for example in examples:
        largest = max(largest, *example.prompt, *(example.demo or ()))
    if largest >= size:
        key = "model.tokenizer" if config.tokenizer else "model.path"
        name = config.tokenizer or config.path
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ConfigError(
            f"{key}={name!r}: the tokenizer encodes {token!r} as {largest}, but the embedding of "
            f"model.path={config.path!r} has only {size} rows: use the model's own tokenizer, or "
            "resize its embedding"
        )


def check_positions(config: ModelConfig, longest: int) -> None:
    """Check that rows of `longest` tokens fit into the model's positions.

    Raises ConfigError if the positions are learned; rotary positions beyond the trained ones only
    get a warning.
    """
    text = _text_config(config)
    positions = getattr(text, "max_position_embeddings", None)
    if (
        not isinstance(positions, int)
        or positions < 1
        or longest <= positions
        or getattr(text, "alibi", False)
    ):
        return
    lower = "lower rollouts.max_completion_length, data.max_prompt_tokens or data.max_demo_tokens"
    message = (
        f"model.path={config.path!r} has {positions} positions, but a prompt with its response may "
        f"have {longest} tokens: {lower}"
    )
    if getattr(text, "rope_parameters", None) is None:
        raise ConfigError(message)
    logger.warning("%s, unless the model supports more than %d positions", message, positions)


def _text_config(config: ModelConfig) -> Any:
    return AutoConfig.from_pretrained(base_folder(config.path)).get_text_config(decoder=True)
