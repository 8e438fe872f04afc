"""Rollout engines behind a common interface."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.errors import import_extra

from .config import RolloutConfig
from .generation import Responses, SamplingParams, generate
from .paged import generate_paged

Policy = Callable[[Sequence[tuple[int, ...]], int], Responses]
"""policy(prompts, samples): `samples` responses per prompt, in order."""
Engine = Callable[[Any], Policy]
"""engine(model): a `Policy` with the model's current weights. Call both on every rank."""


def make_engine(
    config: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    served: str = "",
    longest: int = 0,
    folder: Path | None = None,
) -> Engine:
    """Create the engine selected by `config`.

    For a server, which is contacted immediately: `served` is the model that it must serve,
    `longest` the maximum length of prompt plus response, and `folder` the folder for its weights
    unless `config` sets one.
    """
    params = SamplingParams(
        config.max_completion_length, config.temperature, config.top_p, stop=config.stop
    )
    if config.engine == "vllm":
        module = import_extra("gac.rollouts.vllm", "rollouts.engine=vllm")
        server = module.Server(config.vllm, tokenizer, served, longest, folder)
        return functools.partial(server.load, params=params)

    def engine(model: Any) -> Policy:
        def policy(prompts: Sequence[tuple[int, ...]], samples: int) -> Responses:
            call_params = params._replace(samples=samples)
            if config.engine == "paged":
                return generate_paged(model, tokenizer, prompts, call_params, config.paged)
            return generate(
                model,
                tokenizer,
                prompts,
                batch=config.generation_batch_size,
                batch_tokens=config.generation_batch_tokens,
                **call_params._asdict(),
            )

        return policy

    return engine
