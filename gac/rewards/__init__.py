"""Rewards: numbers for completions. `build_reward` makes one from a configuration value."""

from .base import Reward, RewardError, RowReward
from .build import REWARDS, build_reward, rewards_table
from .combine import SumReward
from .mathematics import MathReward
from .text import ChoiceReward, ExactReward, FormatReward

__all__ = [
    "REWARDS",
    "ChoiceReward",
    "ExactReward",
    "FormatReward",
    "MathReward",
    "Reward",
    "RewardError",
    "RowReward",
    "SumReward",
    "build_reward",
    "rewards_table",
]
