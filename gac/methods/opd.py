"""On-policy distillation: the policy learns from a teacher's opinion of its own rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gac.types import Credit, Mix, Observation, Sampling, State, StepNeeds

from .base import Method


@dataclass(frozen=True)
class OPD(
    Method,
    name="opd",
    family="teacher",
    source="arXiv 2306.13649 with lambda = 1",
    cost="the teacher's forward pass on the rollouts",
):
    """Only the loss of `teacher` on the rollouts; the rewards are measured but not trained on.

    The gradient does not pass through the sampling, as in the publication, and the mean is that of
    `loss.rollout_reduction`.
    """

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(demos=False, teacher=True)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(uses_rewards=False)

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        credit = super().credit(rewards, demos, scale_rewards)
        return credit._replace(
            rollouts=torch.zeros_like(credit.rollouts),
            demo_weight=torch.zeros_like(credit.demo_weight),
        )

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.0)
