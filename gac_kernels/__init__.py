"""One fused operation for hybrid SFT + RL losses, on several backends."""

from .api import (
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    loss_from_logprobs,
    token_logprobs,
)
from .contract import DemoWeight, LossOutput, LossSpec, Signals, TokenMoments

__all__ = [
    "DemoWeight",
    "LossOutput",
    "LossSpec",
    "Signals",
    "TokenMoments",
    "fused_gac_loss",
    "fused_linear_gac_loss",
    "linear_token_logprobs",
    "loss_from_logprobs",
    "token_logprobs",
]
