"""Group-relative advantages and loss weights.

Notation: Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def group_advantages(rewards: torch.Tensor, kind: str) -> torch.Tensor:
    """[Q, K] rewards -> [Q, K] advantages; nan marks a dropped rollout, which gets 0.

    kind: "std" is (r - mean) / (std + 1e-4) in the group (arXiv 2402.03300), "centered" is
    r - mean (arXiv 2503.20783), "batch" is (r - group mean) / (std of the batch + 1e-4).
    A group whose rewards are all equal gets exactly 0, so its rows have no policy gradient.
    """
    valid = ~rewards.isnan()
    centered = torch.where(valid, rewards - rewards.nanmean(1, keepdim=True), 0)
    low = torch.where(valid, rewards, torch.inf).amin(1, keepdim=True)
    high = torch.where(valid, rewards, -torch.inf).amax(1, keepdim=True)
    centered = torch.where(low == high, 0, centered)  # the mean of equal numbers may be inexact
    if kind == "centered":
        return centered
    if kind == "std":
        freedom = valid.sum(1, keepdim=True) - 1
        var = (centered * centered).sum(1, keepdim=True) / freedom.clamp(min=1)
    else:
        flat = rewards[valid]
        var = flat.var() if flat.numel() > 1 else torch.ones(())
    return centered / (var.sqrt() + 1e-4)


class Credit(NamedTuple):
    """Advantages and loss weights for the rollouts and demonstrations of Q prompts."""

    rollouts: torch.Tensor
    """[Q, K] advantages."""
    demos: torch.Tensor
    """[Q] advantages of the prompts' own demonstrations."""
    rollout_weight: torch.Tensor
    """[Q] loss weights of each prompt's rollouts, used if it has a demonstration; 0 drops them."""
    demo_weight: torch.Tensor
    """[Q] loss weights of each prompt's demonstration; 0 drops it."""


def group_credit(rewards: torch.Tensor, demos: torch.Tensor | None, kind: str) -> Credit:
    """Group-relative advantages of `rewards` [Q, K]; every row has weight 1.

    demos: [Q] rewards of demonstrations that belong to their prompt's group (nan: no
        demonstration); None: demonstrations are outside the groups and have advantage 1. kind: see
        `group_advantages`.
    """
    one = torch.ones(len(rewards))
    if demos is None:
        return Credit(group_advantages(rewards, kind), one, one, one)
    table = group_advantages(torch.cat([rewards, demos[:, None]], 1), kind)
    return Credit(table[:, :-1], table[:, -1], one, one)
