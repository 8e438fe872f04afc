"""Rollouts: what one is, how a method samples them, and the advantages of their rewards.

Notation: Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from gac.parallel import collectives


@dataclass(frozen=True)
class Rollout:
    """One rollout: what the policy read and wrote for one prompt, over all its turns."""

    prompt_ids: Sequence[int]
    """Token ids of the prompt."""
    completion_ids: Sequence[int]
    """Token ids after the prompt: the policy's tokens, and those of its environment or tools."""
    loss_mask: Sequence[int]
    """1 for each of `completion_ids` that the policy wrote, 0 for tokens that it only read, such as
    tool results: they have no loss and no part in the statistics."""
    logps: Sequence[float] | None = None
    """Log-probs of `completion_ids` in the engine that sampled them, nats; None: unknown. Used by
    `rollouts.correction`. Values where `loss_mask` is 0 are ignored."""
    reward: float | None = None
    """The reward; None: the configured reward scores the decoded `completion_ids`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Added to `Example.extra` for the configured reward, e.g. the state of the environment."""


class Stage(NamedTuple):
    """Rollouts per prompt that are sampled together; later stages can depend on their rewards."""

    size: int
    """Rollouts per prompt."""
    prefix: float = 0.0
    """Fraction, in [0, 1], of the prompt's demonstration that is given as a prefix to continue."""
    below: float = math.inf
    """The prefix is given only while the mean reward of the earlier stages is below this."""
    trained: int = 0
    """Number of rollouts, from the end of the stage, whose prefix is trained on as a
    demonstration."""
    length: Callable[[int, int, random.Random], int] | None = None
    """Used instead of `prefix`: length(step, tokens, rng) returns the number of prefix tokens for a
    demonstration of `tokens` tokens. The stage's rollouts of one prompt share the prefix."""


@dataclass(frozen=True)
class Sampling:
    """How prompts and demonstrations become training rows, in every step of a run."""

    demos: Literal["separate", "prompt"] = "separate"
    """"separate": a batch from the demonstration set in every step that uses demonstrations.
    "prompt": the demonstrations of the sampled prompts themselves."""
    stages: tuple[Stage, ...] = ()
    """How the K rollouts of a prompt are sampled; empty: all in one stage."""
    from_reference: bool = False
    """Sample the rollouts from the frozen initial policy."""
    pairs: bool = False
    """Keep only each prompt's best and worst rollout, with advantages 1 and -1."""
    groups: bool = False
    """All rollouts of a prompt stay in one micro-batch; a prompt with a dropped rollout has no
    group.
    """
    demo_in_group: bool = False
    """Demonstrations are scored and share the baseline of their prompt's rollouts."""
    teacher: bool = False
    """Measure the policy's log-probs of the rollouts when it has also seen the prompt's
    demonstration; see `Row.context`."""
    collect: int = 0
    """With demos="prompt": collect the demonstrations that `Method.credit` selects, over several
    steps, and train on this many in one step once there are enough; 0: train on them at once."""
    advantages: str | None = None
    """Normalization of the rewards, see `group_advantages`; None: `rollouts.scale_rewards`."""
    demo_tokens: int | None = None
    """Tokens at the end of a demonstration that have a loss; None: all."""
    limit_demos: int | None = None
    """Use only this many demonstrations, from the start of the set; None: all."""
    epochs: int | None = None
    """End the run after this many passes over the demonstrations; None: no such limit."""

    @property
    def has_prefix(self) -> bool:
        """Whether rollouts may continue a prefix of a demonstration."""
        return any(stage.prefix > 0 or stage.length is not None for stage in self.stages)

    def unit(self, completions: int) -> int:
        """Number of rollouts that must share a micro-batch; `completions`: rollouts per prompt."""
        return completions if self.groups else 1 + self.pairs


def group_advantages(rewards: torch.Tensor, scale_rewards: str) -> torch.Tensor:
    """[Q, K] rewards -> [Q, K] advantages; nan marks a dropped rollout, which gets 0.

    scale_rewards: "std" is (r - mean) / (std + 1e-4) in the group (arXiv 2402.03300), "centered" is
    r - mean (arXiv 2503.20783), "batch" is (r - group mean) / (std of the batch + 1e-4), where the
    batch is that of all ranks, so every rank must call this function.
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
        count, total = collectives.total([len(flat), float(flat.sum())])
        (squares,) = collectives.total([float((flat - total / max(count, 1)).square().sum())])
        var = rewards.new_tensor(squares / (count - 1) if count > 1 else 1.0)
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
