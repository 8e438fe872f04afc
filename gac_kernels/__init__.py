"""Fused losses for hybrid SFT + RL post-training, with several backends."""

from .api import (
    fused_gac_loss,
    fused_linear_gac_loss,
    fused_linear_token_loss,
    linear_token_logprobs,
    loss_from_logprobs,
    token_logprobs,
)
from .contract import DemoWeight, LossOutput, LossSpec, Signals, TokenLossOutput, TokenMoments
from .filter import FilterReport, GradientFilter
from .sketch import HeadSketch

__all__ = [
    "DemoWeight",
    "FilterReport",
    "GradientFilter",
    "HeadSketch",
    "LossOutput",
    "LossSpec",
    "Signals",
    "TokenLossOutput",
    "TokenMoments",
    "fused_gac_loss",
    "fused_linear_gac_loss",
    "fused_linear_token_loss",
    "linear_token_logprobs",
    "loss_from_logprobs",
    "token_logprobs",
]
