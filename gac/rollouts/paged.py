"""Sampling with transformers' continuous batching, so that no rollout waits for the longest in its
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.errors import RunError
from gac.models.causal_lm import stop_tokens

from .generation import Draws, PagedConfig, Responses, generation_config, sampling_mode


@torch.no_grad()
def generate_paged(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, ...]],
    draws: Draws,
    config: PagedConfig,
) -> Responses:
    """Responses to each prompt, in order; this rank must hold the full model.

    The seed is drawn from torch's generator. Raises RunError if a response is missing.
    """
    settings = generation_config(draws, stop_tokens(tokenizer, draws.stop), tokenizer.pad_token_id)
    pages = ContinuousBatchingConfig(
        max_batch_tokens=config.max_batch_tokens,
        num_blocks=config.num_blocks,
        page_size=config.page_size,
        seed=int(torch.randint(2**31, ())),
        auto_switch_to_flash=False,  # the same attention as in training
    )
    with sampling_mode(model):
        found = model.generate_batch(
            [list(p) for p in prompts], generation_config=settings, continuous_batching_config=pages
        )
    broken = [r.error for r in found.values() if r.error is not None]
    wanted = len(prompts) * draws.samples
    if broken or len(found) != wanted:
        raise RunError(
            f"rollouts.engine=paged: only {len(found) - len(broken)} of {wanted} responses were generated"
            f"{f' ({broken[0]})' if broken else ''}: lower rollouts.paged.max_batch_tokens or "
            "num_blocks, or use rollouts.engine=generate; then rerun the command to resume from the last checkpoint"
        )
    # results are in prompt order; within a request, the child samples precede their parent
    return [tuple(r.generated_tokens) for r in found.values()]
