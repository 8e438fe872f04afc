"""The caller's batch as one value, on its way from the public calls to the backends."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BatchInputs(NamedTuple):
    """What belongs to a batch beside its logits; shapes and meaning as in `fused_gac_loss`.

    The operators of `ops` take these fields in this order.
    """

    targets: Tensor  # int64 [B, T] or [N]
    advantages: Tensor  # [B], [B, T], [S] or [N]
    is_demo: Tensor  # bool [S]
    mu: float | Tensor = 0.5
    old_logps: Tensor | None = None  # like targets
    ref_logps: Tensor | None = None  # like targets
    cu_seqlens: Tensor | None = None  # int [S + 1]; None: padded
    rollout_norm: float | Tensor | None = None
    demo_norm: float | Tensor | None = None
