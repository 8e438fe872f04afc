"""Sampling with transformers' continuous batching: no rollout waits for the longest of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.errors import RunError
from gac.models.causal_lm import stop_tokens

from .config import PagedConfig
from .generation import Responses, SamplingParams, generation_config, sampling_mode

CPU_BATCH = 256  # tokens per forward on a CPU


@torch.no_grad()
def generate_paged(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    config: PagedConfig,
) -> Responses:
    """Sample responses to each prompt, in order; this rank must have the full model.

    The seed is drawn from torch's generator. Raises RunError if a response is missing.
    """
    stops = stop_tokens(tokenizer, params.stop)
    settings = generation_config(params, stops, tokenizer.pad_token_id)
    # on a CPU, transformers would take most of the machine's memory: allow only what all responses
    # need
    on_cpu = next(model.parameters()).device.type == "cpu"
    blocks = params.samples * sum(
        -(-(len(prompt) + params.max_completion_length) // config.block_size) for prompt in prompts
    )
    pages = ContinuousBatchingConfig(
        max_batch_tokens=config.max_batch_tokens or (CPU_BATCH if on_cpu else None),
        num_blocks=config.num_blocks or (blocks if on_cpu else None),
        block_size=config.block_size,
        seed=int(torch.randint(2**31, ())),
        auto_switch_to_flash=False,  # the same attention as in training
    )
    with sampling_mode(model):
        results = model.generate_batch(
            [list(p) for p in prompts], generation_config=settings, continuous_batching_config=pages
        )
    errors = [r.error for r in results.values() if r.error is not None]
    expected = len(prompts) * params.samples
    if errors or len(results) != expected:
        count = len(results) - len(errors)
        cause = f" ({errors[0]})" if errors else ""
        raise RunError(
            f"rollouts.engine=paged: only {count} of {expected} responses were generated{cause}: "
            "lower rollouts.paged.max_batch_tokens or num_blocks, or use rollouts.engine=generate; "
            "then rerun the command to resume from the last checkpoint"
        )
    # results are in prompt order; within a request, the child samples precede their parent
    return [tuple(r.generated_tokens) for r in results.values()]
