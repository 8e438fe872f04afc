"""Fused losses for hybrid SFT + RL post-training, with several backends."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        fused_gac_loss,
        fused_linear_divergence,
        fused_linear_gac_loss,
        fused_linear_token_loss,
        linear_token_logprobs,
        loss_from_logprobs,
        token_logprobs,
    )
    from .contract import (
        DemoWeight,
        DivergenceOutput,
        LossOutput,
        LossSpec,
        Signals,
        TokenLossOutput,
        TokenMoments,
    )

__all__ = [
    "DemoWeight",
    "DivergenceOutput",
    "LossOutput",
    "LossSpec",
    "Signals",
    "TokenLossOutput",
    "TokenMoments",
    "fused_gac_loss",
    "fused_linear_divergence",
    "fused_linear_gac_loss",
    "fused_linear_token_loss",
    "linear_token_logprobs",
    "loss_from_logprobs",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    """Import public names lazily: reading a configuration needs the options but no torch."""
    for module in ("contract", "api") if name in __all__ else ():
        found = import_module(f".{module}", __name__)
        if hasattr(found, name):
            return globals().setdefault(name, getattr(found, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
