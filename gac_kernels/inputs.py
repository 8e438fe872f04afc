"""The caller's batch, as the public functions pass it to the backends."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class BatchInputs(NamedTuple):
    """The inputs of a batch other than its logits; shapes and meaning as in `fused_gac_loss`.

    The operators of `ops` take these fields in this order.
    """

    targets: Tensor  # int64 [B, T] or [N]
    advantages: Tensor  # [B], [B, T], [S] or [N]
    is_demo: Tensor  # bool [B] or [S]
    mu: float | Tensor = 0.5
    old_logps: Tensor | None = None  # like targets
    ref_logps: Tensor | None = None  # like targets
    cu_seqlens: Tensor | None = None  # int [S + 1]; None: padded
    rollout_norm: float | Tensor | None = None
    demo_norm: float | Tensor | None = None

    def to_targets_device(self) -> BatchInputs:
        """Move all tensors to the targets' device, without blocking the host.

        Tensors are moved before any conversion: a CUDA graph can capture copies from pinned memory
        only, and the result of a conversion on the CPU is not pinned.
        """

        def to_device(x: Any) -> Any:
            return x.to(self.targets.device, non_blocking=True) if isinstance(x, Tensor) else x

        return BatchInputs(*(to_device(x) for x in self))
