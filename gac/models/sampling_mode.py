"""The state of a model while rollouts are sampled from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import GenerationConfig

from .precision import autocast
from .row_attention import without_row_attention


@contextlib.contextmanager
def sampling_mode(model: Any) -> Iterator[None]:
    """Context for sampling: eval mode, PyTorch's attention, a default GenerationConfig.

    Every engine supports PyTorch's attention. The model's generation defaults would be off-policy.
    """
    # switch only modules in training mode, so that modules kept in eval mode stay there afterwards
    training = [module for module in model.modules() if module.training]
    defaults, model.generation_config = model.generation_config, GenerationConfig()
    for module in training:
        module.training = False
    try:
        with without_row_attention(model), autocast(model):
            yield
    finally:
        model.generation_config = defaults
        for module in training:
            module.training = True
