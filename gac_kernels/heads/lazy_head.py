"""Lazy logits for trainers that take log-probs from the logits of transformers' models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gac_kernels import linear_token_logprobs, token_logprobs

from .patch import Patch, original, supported
from .transformers import LazyLogits, fuse


def logprobs(logits: LazyLogits, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, ...]:
    """Log-probability of each target [B, T], and entropy, without computing the logits."""
    record = logits.record
    linear = record.linear()
    if linear is None:
        return token_logprobs(record.full(), targets, temperature=temperature)
    hidden, weight, scaling = linear
    with record.precision():
        return linear_token_logprobs(hidden, weight, targets, temperature=temperature, **scaling)


def lazy_head(
    module_name: str, model_class: str, functions: dict[str, Callable[..., Any]]
) -> Patch:
    """Make a trainer's models return lazy logits, and replace the functions that read them.

    Args:
        module_name: module of the trainer that has the class and the functions.
        model_class: class whose attribute `model` is a model of transformers.
        functions: replacements by name; called with the own function and its arguments if the
            logits are lazy.

    Raises:
        ImportError: the installed version has no such names.
    """
    module = supported(module_name, model_class, *functions)
    wrapper = getattr(module, model_class)
    patches = [(wrapper, "forward", _lazy_forward(original(wrapper, "forward")))]
    patches += [(module, x, _replacement(original(module, x), new)) for x, new in functions.items()]
    return Patch(*patches)


@functools.cache  # so that a second patch is a no-op
def _lazy_forward(own: Any) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        fuse(self.model).lazy = True
        return own(self, *args, **keywords)

    return forward


@functools.cache
def _replacement(own: Any, new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    @torch.compiler.disable
    def function(logits: Tensor, *args: Any, **keywords: Any) -> Any:
        return (new if isinstance(logits, LazyLogits) else own)(logits, *args, **keywords)

    return function
