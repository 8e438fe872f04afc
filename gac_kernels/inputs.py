"""The caller's batch as one value, on its way from the public calls to the backends."""

from __future__ import annotations

from typing import Any, NamedTuple

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

    def moved(self) -> BatchInputs:
        """The same where the targets are; the host does not wait for copies from the CPU.

        As they are, before any other change: a CUDA graph records copies from pinned memory only,
        and what a conversion on the CPU makes is not pinned.
        """

        def there(x: Any) -> Any:
            return x.to(self.targets.device, non_blocking=True) if isinstance(x, Tensor) else x

        return BatchInputs(*(there(x) for x in self))
