"""Row kernels in Triton."""

from __future__ import annotations

import torch


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return "not written"
