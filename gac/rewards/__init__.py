"""Rewards that score completions; `build_reward` builds one from its configuration.

This package may import `sandbox` and earlier packages.
"""

from .base import Reward, RewardError, RowReward
from .build import REWARDS, build_reward, rewards_table
from .code import CodeReward
from .combine import SumReward
from .mathematics import MathReward
from .noise import NoisyReward, RewardNoise, build_rewards
from .tally import Tally, closing_reward
from .text import ChoiceReward, ExactReward, FormatReward

__all__ = [
    "REWARDS",
    "ChoiceReward",
    "CodeReward",
    "ExactReward",
    "FormatReward",
    "MathReward",
    "NoisyReward",
    "Reward",
    "RewardError",
    "RewardNoise",
    "RowReward",
    "SumReward",
    "Tally",
    "build_reward",
    "build_rewards",
    "closing_reward",
    "rewards_table",
]
