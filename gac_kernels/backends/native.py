"""Row kernels in vectorised C++ for the CPU."""

from __future__ import annotations

import torch


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return "the extension is not built"
