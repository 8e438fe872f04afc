"""Routing by group: unsolved prompts get their demonstration, all others only RL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gac.parallel import collectives
from gac.rollouts.advantages import Credit

from .base import OURS
from .superrl import SuperRL


@dataclass(frozen=True)
class Routing(SuperRL):
    """superrl with each prompt weighted equally, so that mu is the share of unsolved prompts.

    With U of Q prompts unsolved, on all ranks: loss = U/Q mean(L_SFT over the unsolved) + (1 - U/Q)
    mean(L_RL over the others). `superrl` adds the two means, so that a single unsolved
    prompt weighs as much as all others together. Prompts without a demonstration have weight 1.
    """

    name: ClassVar[str] = "routing"
    family: ClassVar[str] = OURS
    source: ClassVar[str] = "the rule of arXiv 2506.01096v2 and 2509.04419, normalized by prompts"

    def credit(self, rewards: torch.Tensor, demos: torch.Tensor | None, kind: str) -> Credit:
        credit = super().credit(rewards, demos, kind)
        unsolved, prompts = collectives.total([credit.demo_weight.sum().item(), len(rewards)])
        share = unsolved / prompts
        return credit._replace(  # `mix` weighs both terms by 1
            rollout_weight=credit.rollout_weight * (1 - share),
            demo_weight=credit.demo_weight * share,
        )
