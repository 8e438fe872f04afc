"""The engines that draw rollouts, behind one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.errors import import_extra

from .generation import Draws, Responses, RolloutConfig, generate
from .paged import generate_paged

Policy = Callable[[Sequence[tuple[int, ...]], int], Responses]
"""policy(prompts, samples): so many responses to each prompt, in order."""
Engine = Callable[[Any], Policy]
"""engine(model): the model as it is now, to draw from. Every rank makes each of these calls."""


def make_engine(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, *, served: str = "",
    longest: int = 0, folder: Path | None = None,
) -> Engine:  # fmt: skip
    """The engine that `config` names.

    For a server, which is asked at once: `served` is the model it must have, prompts with their
    responses have up to `longest` tokens, and `folder` takes its weights unless `config` says.
    """
    draws = Draws(config.max_new_tokens, config.temperature, config.top_p, stop=config.stop)
    if config.engine == "vllm":
        module = import_extra("gac.rollouts.vllm", "rollouts.engine=vllm")
        server = module.Server(config.vllm, tokenizer, served, longest, folder)
        return functools.partial(server.load, draws=draws)

    def engine(model: Any) -> Policy:
        def policy(prompts: Sequence[tuple[int, ...]], samples: int) -> Responses:
            mine = draws._replace(samples=samples)
            if config.engine == "paged":
                return generate_paged(model, tokenizer, prompts, mine, config.paged)
            return generate(model, tokenizer, prompts, batch=config.batch,
                            batch_tokens=config.batch_tokens, **mine._asdict())  # fmt: skip

        return policy

    return engine
