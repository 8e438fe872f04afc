"""Rewards that score completions; `build_reward` builds one from its configuration."""

from .base import Reward, RewardError, RowReward, Tally, closing_reward
from .build import REWARDS, build_reward, rewards_table
from .code import CodeReward
from .combine import SumReward
from .mathematics import MathReward
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
    "closing_reward",
    "rewards_table",
]
