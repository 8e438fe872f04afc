"""Lazy logits for trainers that take log-probs from the logits of transformers' models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gac_kernels import linear_token_logprobs, token_logprobs
from gac_kernels.transformers import LazyLogits, fuse

from .patch import Patch


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
    try:
        module = import_module(module_name)
        wrapper, own = getattr(module, model_class), {x: getattr(module, x) for x in functions}
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"apply_fused_head: no support for the installed version: {error}"
        ) from error
    patches = [(wrapper, "forward", _lazy_forward(wrapper.forward))]
    patches += [(module, name, _replacement(own[name], new)) for name, new in functions.items()]
    return Patch(*patches)


def _lazy_forward(own: Any) -> Callable[..., Any]:
    if hasattr(own, "gac_own"):  # a second call is a no-op
        return own

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        fuse(self.model).lazy = True
        return own(self, *args, **keywords)

    forward.gac_own = own  # type: ignore[attr-defined] # a mark
    return forward


def _replacement(own: Any, new: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(own, "gac_own"):
        return own

    @functools.wraps(own)
    @torch.compiler.disable
    def function(logits: Tensor, *args: Any, **keywords: Any) -> Any:
        return (new if isinstance(logits, LazyLogits) else own)(logits, *args, **keywords)

    function.gac_own = own  # type: ignore[attr-defined] # a mark
    return function
