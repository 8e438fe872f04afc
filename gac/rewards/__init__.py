"""Rewards: numbers for completions. `build_reward` makes one from a configuration value."""

from gac.rewards.base import Reward, RewardError, RowReward
from gac.rewards.build import REWARDS, build_reward
from gac.rewards.combine import SumReward
from gac.rewards.mathematics import MathReward
from gac.rewards.text import ChoiceReward, ExactReward, FormatReward

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
]
