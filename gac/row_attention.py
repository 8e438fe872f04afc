"""Attention of packed rows, one row at a time.

PyTorch's own attention takes rows that lie end to end as one row under a mask, so it computes the
square of all their tokens. Here it computes the square of each row, from the bounds that flash
attention takes too. transformers knows it by NAME.

On CPUs: on a GPU every row would be a launch of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_by_rows"
_unmasked = ContextVar("_unmasked", default=False)


def enable(model: Any) -> bool:
    """Let `model` attend so where it used PyTorch's attention; False if it does not.

    A layer may see all of its row before it, or a window of that, but nothing else: its mask is
    not asked.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    known = kinds <= {"full_attention", "sliding_attention"}
    if config._attn_implementation != "sdpa" or not known:
        return False
    if getattr(config, "attention_chunk_size", None) is not None:
        return False
    config._attn_implementation = NAME
    return True


def disable(model: Any) -> bool:
    """Undo `enable`; False if there is nothing to undo."""
    config = getattr(model, "module", model).config  # DDP has the model in it
    if config._attn_implementation != NAME:
        return False
    config._attn_implementation = "sdpa"
    return True


@contextlib.contextmanager
def plain(model: Any) -> Iterator[None]:
    """PyTorch's own attention for a while, for what asks for it by name."""
    enabled = disable(model)
    try:
        yield
    finally:
        if enabled:
            enable(model)


@contextlib.contextmanager
def bounds_given(given: bool) -> Iterator[None]:
    """Whether the forward inside knows the bounds of its rows, so that no mask is made for them."""
    token = _unmasked.set(given)
    try:
        yield
    finally:
        _unmasked.reset(token)


def _mask(*args: Any, **keywords: Any) -> Tensor | None:
    return None if _unmasked.get() else sdpa_mask(*args, **keywords)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None, **keywords: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query, key, value [1, heads, N, D] and the rows' bounds; else as PyTorch's own."""
    if cu_seq_lens_q is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)
    lengths = cu_seq_lens_q.diff().tolist()
    window = keywords.get("sliding_window")
    # split, not slices: the gradient of each slice would be as long as all rows
    parts = zip(lengths, *(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    rows = [sdpa_attention_forward(module, q, k, v, _band(n, window, query), **keywords)[0]
            for n, q, k, v in parts]  # fmt: skip
    return torch.cat(rows, 1), None


def _band(length: int, window: int | None, like: Tensor) -> Tensor | None:
    """[length, length]: the last `window` places up to one's own; None where these are all."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=like.device)
    back = places[:, None] - places
    return ((back >= 0) & (back < window))[None, None]


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
