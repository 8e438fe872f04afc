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
    is_demo: Tensor  # bool [B], [B, T], [S] or [N]
    mu: float | Tensor = 0.5
    old_logps: Tensor | None = None  # like targets
    ref_logps: Tensor | None = None  # like targets
    cu_seqlens: Tensor | None = None  # int [S + 1]; None: padded
    rollout_norm: float | Tensor | None = None
    demo_norm: float | Tensor | None = None
    weights: Tensor | None = None  # [B], [B, T], [S] or [N]
    rollout_logps: Tensor | None = None  # like targets

    @property
    def sequences(self) -> int:
        return self.targets.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def is_per_sequence(self, x: Tensor) -> bool:
        """Whether `x` is [S], one value per sequence; if S == N, also True for values per token."""
        return x.shape == (self.sequences,)

    def to_targets_device(self) -> BatchInputs:
        """Detach all tensors and move them to the targets' device, without blocking the host.

        Tensors are moved before any conversion: a CUDA graph can capture copies from pinned memory
        only, and the result of a conversion on the CPU is not pinned.
        """
        device = self.targets.device

        def to_device(x: Any) -> Any:
            return x.detach().to(device, non_blocking=True) if isinstance(x, Tensor) else x

        return BatchInputs(*(to_device(x) for x in self))
