"""Advantages of rollouts, from the rewards of their groups.

Notation: Q prompts of all ranks, K rollouts per prompt.
"""

from __future__ import annotations

import torch

from gac.types import Credit


def group_advantages(rewards: torch.Tensor, scale_rewards: str) -> torch.Tensor:
    """[Q, K] rewards -> [Q, K] advantages; nan marks a dropped rollout, which gets 0.

    scale_rewards: "std" is (r - mean) / (std + 1e-4) in the group (arXiv 2402.03300), "centered" is
    r - mean (arXiv 2503.20783), "batch" is (r - group mean) / (std of the batch + 1e-4).
    A group whose rewards are all equal gets exactly 0, so its rows have no policy gradient.
    """
    valid = ~rewards.isnan()
    centered = torch.where(valid, rewards - rewards.nanmean(1, keepdim=True), 0)
    low = torch.where(valid, rewards, torch.inf).amin(1, keepdim=True)
    high = torch.where(valid, rewards, -torch.inf).amax(1, keepdim=True)
    centered = torch.where(low == high, 0, centered)  # the mean of equal numbers may be inexact
    if scale_rewards == "centered":
        return centered
    if scale_rewards == "std":
        freedom = valid.sum(1, keepdim=True) - 1
        var = (centered * centered).sum(1, keepdim=True) / freedom.clamp(min=1)
    else:
        flat = rewards[valid].double()
        count = len(flat)
        squares = float((flat - float(flat.sum()) / max(count, 1)).square().sum())
        var = rewards.new_tensor(squares / (count - 1) if count > 1 else 1.0)
    return centered / (var.sqrt() + 1e-4)


def group_credit(rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str) -> Credit:
    """Group-relative advantages of `rewards` [Q, K]; every row has weight 1.

    demos: [Q] rewards of demonstrations that belong to their prompt's group (nan: no
        demonstration); None: demonstrations are outside the groups and have advantage 1.
    scale_rewards: see `group_advantages`.
    """
    one = torch.ones(len(rewards))
    if demos is None:
        return Credit(group_advantages(rewards, scale_rewards), one, one, one)
    table = group_advantages(torch.cat([rewards, demos[:, None]], 1), scale_rewards)
    return Credit(table[:, :-1], table[:, -1], one, one)
