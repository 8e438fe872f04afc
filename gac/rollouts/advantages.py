"""Group-relative advantages. Legend: Q prompts, K rollouts per prompt."""

from __future__ import annotations

import torch
from torch import Tensor

ADVANTAGES = ("std", "centered", "batch")


def group_advantages(rewards: Tensor, kind: str) -> Tensor:
    """[Q, K] rewards -> [Q, K] advantages; nan marks a dropped rollout, which gets 0.

    kind: "std" is (r - mean) / (std + 1e-4) in the group (arXiv 2402.03300), "centered" is
    r - mean (arXiv 2503.20783), "batch" is (r - group mean) / (std of the batch + 1e-4).
    A group whose rewards are all equal gets exactly 0: its rows teach nothing.
    """
    valid = ~rewards.isnan()
    count = valid.sum(1, keepdim=True)
    mean = rewards.nansum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(valid, rewards - mean, 0)
    low = torch.where(valid, rewards, torch.inf).amin(1, keepdim=True)
    high = torch.where(valid, rewards, -torch.inf).amax(1, keepdim=True)
    centred = torch.where(low == high, 0, centred)  # the mean of equal numbers may round
    if kind == "centered":
        return centred
    if kind == "std":
        var = (centred * centred).sum(1, keepdim=True) / (count - 1).clamp(min=1)
    else:
        flat = rewards[valid]
        var = flat.var() if flat.numel() > 1 else torch.ones(())
    return centred / (var.sqrt() + 1e-4)
