"""Attention within each row of a packed batch, for CPUs.

PyTorch's SDPA treats packed rows as one masked row, so its cost is quadratic in their total length.
With `enable_row_attention`, it is quadratic in each row's length: the rows are split at flash
attention's row bounds. For CPUs only: on a GPU every row would need its own kernel launch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ROW_ATTENTION = "sdpa_by_rows"
_unmasked = ContextVar("_unmasked", default=False)


def enable_row_attention(model: Any) -> bool:
    """Replace SDPA in `model` with this attention; False if that is not possible.

    Only causal and sliding-window layers are supported, because the attention mask is ignored.
    """
    config = model.config
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft
    kinds = set(getattr(config, "layer_types", None) or ())
    if (
        config._attn_implementation != "sdpa"
        or not kinds <= {"full_attention", "sliding_attention"}
        or getattr(config, "attention_chunk_size", None) is not None
        # whether the family uses transformers' table of attention functions
        or not hasattr(sys.modules[type(base).__module__], "ALL_ATTENTION_FUNCTIONS")
    ):
        return False
    config._attn_implementation = ROW_ATTENTION
    return True


def disable_row_attention(model: Any) -> bool:
    """Undo `enable_row_attention`; False if there is nothing to undo."""
    config = getattr(model, "module", model).config  # unwrap DDP
    if config._attn_implementation != ROW_ATTENTION:
        return False
    config._attn_implementation = "sdpa"
    return True


def attends_by_row(model: Any) -> bool:
    """Whether attention over packed rows costs no more than attention over separate rows."""
    name = str(getattr(model, "module", model).config._attn_implementation)
    return name == ROW_ATTENTION or "flash" in name


@contextlib.contextmanager
def without_row_attention(model: Any) -> Iterator[None]:
    """Temporarily restore PyTorch's attention, for code that checks for it by name."""
    config = getattr(model, "module", model).config
    before = config._attn_implementation
    disable_row_attention(model)
    try:
        yield
    finally:
        config._attn_implementation = before


@contextlib.contextmanager
def without_mask(enabled: bool) -> Iterator[None]:
    """Context for a forward with row bounds; if `enabled`, no attention mask is created."""
    token = _unmasked.set(enabled)
    try:
        yield
    finally:
        _unmasked.reset(token)


def _mask(*args: Any, **keywords: Any) -> Tensor | None:
    return None if _unmasked.get() else sdpa_mask(*args, **keywords)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention within each row for query, key, value [1, heads, N, D].

    Without row bounds, PyTorch's SDPA.
    """
    if cu_seq_lens_q is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)
    lengths = cu_seq_lens_q.diff().tolist()
    window = keywords.get("sliding_window")
    # split instead of slicing: the gradient of each slice would have the length of all rows
    rows = zip(lengths, *(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    outputs = [
        sdpa_attention_forward(module, q, k, v, _band(n, window, query), **keywords)[0]
        for n, q, k, v in rows
    ]
    return torch.cat(outputs, 1), None


def _band(length: int, window: int | None, like: Tensor) -> Tensor | None:
    """[1, 1, length, length] mask of each position's last `window` positions, itself included.

    None if the window covers the row.
    """
    if window is None or length <= window:
        return None
    positions = torch.arange(length, device=like.device)
    distance = positions[:, None] - positions
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(ROW_ATTENTION, _attention)
AttentionMaskInterface.register(ROW_ATTENTION, _mask)
