"""Rewards: numbers for completions. `build_reward` makes one from a configuration value."""

from .base import Reward, RewardError, RowReward
from .build import REWARDS, build_reward, rewards_table
from .code import CodeReward
from .combine import SumReward
from .mathematics import MathReward
from .tally import Tally, in_use
from .text import ChoiceReward, ExactReward, FormatReward

__all__ = [
    "REWARDS",
    "ChoiceReward",
    "CodeReward",
    "ExactReward",
    "FormatReward",
    "MathReward",
    "Reward",
    "RewardError",
    "RowReward",
    "SumReward",
    "Tally",
    "build_reward",
    "in_use",
    "rewards_table",
]
