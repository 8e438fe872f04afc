"""Methods that choose for each sampled prompt between its demonstration and its rollouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gac.fields import Count, NonNegative, Number, Positive, require_default
from gac.types import Credit, Sampling
from gac_kernels import DemoWeight, LossSpec

from .base import OURS, Loss, Sum, TokenWeighted


@dataclass(frozen=True)
class MultiTask(
    Sum,
    TokenWeighted,
    name="multitask",
    source="arXiv 2504.14945, baseline RL w/ SFT loss",
):
    """The RL loss plus a constant times the SFT loss of the same prompts' demonstrations."""

    sft_coef: NonNegative = 1.0
    """Factor of the SFT loss, >= 0."""

    def loss(self, base: LossSpec) -> Loss:
        return super().loss(replace(base, demo_reduction="token"))

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt")


@dataclass(frozen=True)
class SuperRL(Sum, TokenWeighted, name="superrl", source="arXiv 2506.01096v2"):
    """Prompts whose rollouts all have reward 0 are trained only on their demonstration.

    Every other prompt is trained by RL: loss = sum over prompts of L_SFT where max_k r_k <= 0, else
    L_RL. This is the second version of the publication; the first version switched for a whole run.
    The publication leaves open how the two sums are normalized: here each term is the mean over its
    own rows, and the terms are added. HPT is the same rule with another RL loss.
    """

    correct: Number = 0.0
    """A prompt is trained by RL if the reward of any rollout is above this."""

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt")

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        solved = (rewards > self.correct).any(1).to(rewards.dtype)  # nan: a dropped rollout
        scored = ~rewards.isnan().all(1)
        weights = {"rollout_weight": solved, "demo_weight": (1 - solved) * scored}
        return super().credit(rewards, demos, scale_rewards)._replace(**weights)


@dataclass(frozen=True)
class Routing(
    SuperRL,
    name="routing",
    family=OURS,
    source="the rule of arXiv 2506.01096v2 and 2509.04419, normalized by prompts",
):
    """superrl with each prompt weighted equally, so that mu is the share of unsolved prompts.

    With U of Q prompts unsolved, on all ranks: loss = U/Q mean(L_SFT over the unsolved) + (1 - U/Q)
    mean(L_RL over the others). `superrl` adds the two means, so that a single unsolved
    prompt weighs as much as all others together. Prompts without a demonstration have weight 1, and
    count in U if they are unsolved.
    """

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        credit = super().credit(rewards, demos, scale_rewards)
        share = credit.demo_weight.sum().item() / len(rewards)  # of the prompts on all ranks
        return credit._replace(  # `mix` weighs both terms by 1
            rollout_weight=credit.rollout_weight * (1 - share),
            demo_weight=credit.demo_weight * share,
        )


@dataclass(frozen=True)
class Unclipped(Sum):
    """RL as in the released code of HPT and ReLIFT, plus `sft_coef` times SFT.

    Advantages are centered, nothing is clipped, and sums are divided by `loss.max_tokens`.
    """

    sft_coef: Positive = 1.0
    """Factor of the SFT loss, > 0; HPT uses 0.3 for a 1.5B model."""
    entropy_coef: Number = 0.001
    """Weight of the entropy bonus on rollouts."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations."""

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(
            base,
            demo_weight=self.weight,
            demo_reduction="token",
            clip_low=None,
            clip_high=None,
            entropy_coef=self.entropy_coef,
            rollout_reduction="constant",
        )
        return Loss(spec)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", advantages="centered")


@dataclass(frozen=True)
class HPT(Unclipped, name="hpt", source="arXiv 2509.04419"):
    """Prompts with at most `switch` correct rollouts are trained only on their demonstration.

    RL follows the released code: centered advantages, no clipping, sums divided by
    `loss.max_tokens`. Its rule to skip updates with a gradient norm above 80 is not implemented.
    """

    switch: int = 0
    """Largest number of correct rollouts at which a prompt is trained by SFT."""
    correct: Number = 0.5
    """A rollout is correct if its reward is above this."""
    table: tuple[float, ...] | None = None
    """Soft gate: SFT weight in [0, 1] of a prompt with 0, 1, ..., K correct rollouts; its RL weight
    is 1 minus that. null: the hard gate.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is not None and not (self.table and all(0 <= x <= 1 for x in self.table)):
            raise ValueError(f"table={self.table!r}: use numbers in [0, 1], or null")
        if self.table is not None:
            require_default(self, "switch", "switch", "with table")

    def sampling(self, completions: int) -> Sampling:
        if self.table is not None and len(self.table) != completions + 1:
            raise ValueError(
                f"method.table={self.table!r}: use {completions + 1} numbers, for 0 to "
                f"{completions} correct rollouts"
            )
        return super().sampling(completions)

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        num_correct = (rewards > self.correct).sum(1)
        if self.table is None:
            sft = (num_correct <= self.switch).to(rewards.dtype)
        else:
            sft = torch.tensor(self.table, dtype=rewards.dtype)[num_correct]
        credit = super().credit(rewards, demos, scale_rewards)
        return credit._replace(rollout_weight=1 - sft, demo_weight=sft * ~rewards.isnan().all(1))


@dataclass(frozen=True)
class ReLIFT(Unclipped, name="relift", source="arXiv 2506.07527 and its code"):
    """RL on all prompts; SFT on `buffer` unsolved prompts whenever that many have been collected.

    A prompt is unsolved if the reward of every rollout is at most `correct`. The newest `buffer`
    of them are trained on and removed. RL follows the released code: centered advantages, no
    clipping, sums divided by `loss.max_tokens`; SFT is the mean over tokens. The publication makes
    a separate SFT update with its own optimizer after the RL update; here one update uses the sum
    of both gradients. The entropy bonus covers the rollouts only.
    """

    buffer: Count = 128
    """Number of unsolved prompts that are trained on together."""
    correct: Number = 0.0
    """A prompt is unsolved if no rollout has a reward above this."""

    def sampling(self, completions: int) -> Sampling:
        return replace(super().sampling(completions), collect=self.buffer)

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        solved = (rewards > self.correct).any(1).to(rewards.dtype)  # nan: a dropped rollout
        unsolved = (1 - solved) * ~rewards.isnan().all(1)
        return super().credit(rewards, demos, scale_rewards)._replace(demo_weight=unsolved)
