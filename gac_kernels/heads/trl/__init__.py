"""The fused head and loss in TRL.

`apply_fused_head()` serves every trainer of TRL; `FusedGRPOTrainer` and `FusedAsyncGRPOTrainer`
also compute GRPO's loss in the same pass. TRL's trainers are imported when ours are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .head import apply_fused_head

if TYPE_CHECKING:
    from .async_grpo import FusedAsyncGRPOTrainer
    from .grpo import FusedGRPOMixin, FusedGRPOTrainer

__all__ = ["FusedAsyncGRPOTrainer", "FusedGRPOMixin", "FusedGRPOTrainer", "apply_fused_head"]

_TRAINERS = {
    "FusedAsyncGRPOTrainer": "async_grpo",
    "FusedGRPOMixin": "grpo",
    "FusedGRPOTrainer": "grpo",
}


def __getattr__(name: str) -> Any:
    if name not in _TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_TRAINERS[name]}", __name__), name)
