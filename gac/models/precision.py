"""The precision in which a patched model computes; its weights may have a higher one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def autocast(model: nn.Module) -> AbstractContextManager[Any]:
    """Context in which a patched model computes in its precision; it caches cast weights."""
    dtype = next((d for m in model.modules() if (d := m.__dict__.get("autocast"))), None)
    device = next(model.parameters()).device.type
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which a patched model multiplies; its weights may have a higher precision."""
    patched = patched_model(model)
    return patched.__dict__.get("compute_dtype") or patched.dtype


def set_compute_dtype(model: nn.Module, dtype: torch.dtype, by_autocast: bool) -> None:
    """Let a patched model multiply in `dtype`; FSDP casts the weights itself, without autocast."""
    patched = patched_model(model)
    patched.__dict__["compute_dtype"] = dtype
    patched.__dict__["autocast"] = dtype if by_autocast else None


def patched_model(model: nn.Module) -> Any:
    """The patched model inside any wrappers."""
    return next(m for m in model.modules() if "plain_head" in m.__dict__)
