"""The key-value cache with which the engine `generate` samples."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

ROOM = 64  # tokens for which a layer reserves memory whenever it is full


def make_cache(model: Any) -> Cache | None:
    """An empty cache whose rows can be repeated and selected.

    None for a model that has recurrent states, or a cache of its own.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft
    if (
        getattr(base, "_is_stateful", False)
        or "past_key_values" not in inspect.signature(base.forward).parameters
    ):
        return None
    cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    kinds = {type(layer) for layer in cache.layers}
    if not kinds or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return None
    layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    return Cache(layers=layers)


class GrowingLayer(DynamicLayer):
    """A layer that writes new tokens behind the old ones, without copying these each time.

    Under autocast, it stores the dtype of the computation: attention would otherwise convert the
    whole cache for each new token.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._buffers: list[Tensor | None] = [None, None]  # of the keys and the values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values [B, heads, T, D], with the new ones at the end."""
        kind = key_states.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append(0, self.keys, key_states)
        self.values = self._append(1, self.values, value_states)
        return self.keys, self.values

    def _append(self, which: int, old: Tensor | None, new: Tensor) -> Tensor:
        assert old is not None  # initialized
        start = old.shape[-2] if old.dim() > 1 else 0
        end, buffer = start + new.shape[-2], self._buffers[which]
        # rows that were repeated or selected are in memory of their own
        if buffer is None or buffer.data_ptr() != old.data_ptr() or buffer.shape[-2] < end:
            buffer = new.new_empty(*new.shape[:2], end + ROOM, new.shape[-1])
            if start:
                buffer[:, :, :start] = old
            self._buffers[which] = buffer
        buffer[:, :, start:end] = new
        return buffer[:, :, :end]
