"""SDPG: the policy gradient plus a reverse KL to the policy that sees the demonstration."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gac.fields import NonNegative
from gac.types import Credit, Mix, Observation, Sampling, State, StepNeeds
from gac_kernels import LossSpec

from .base import Loss, Method
from .teacher import TeacherConfig


@dataclass(frozen=True)
class SDPG(
    Method,
    name="sdpg",
    family="teacher",
    source="arXiv 2606.04036 and its code",
    cost="forward pass on the rollouts with the demonstration before them; reference forward pass",
):
    """GRPO plus the reverse KL to the policy that sees the demonstration, and a k2 to the initial.

    The KL to the teacher, which has the current weights, is over the full vocabulary in the
    publication; here it is over `teacher.top_k` tokens and one bin for all others, and over the
    full vocabulary with null. The released code shows the teacher the answer; here it sees the
    demonstration. All terms are means over tokens. Prompts without a demonstration are trained
    without a teacher. The code's warm-up and decay of `coef` and its restriction to responses with
    a positive advantage are not implemented.
    """

    coef: NonNegative = 1e-3
    """Weight of the KL to the teacher, the publication's beta; 0.001 in the released script."""
    kl_coef: NonNegative = 1e-3
    """Weight of the k2 estimate of the KL to the initial policy, the publication's alpha."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(demos=False, teacher=True, kl=self.kl_coef != 0)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", teacher=True)

    def loss(self, base: LossSpec) -> Loss:
        estimator = "k2" if self.kl_coef else base.kl_estimator
        spec = replace(base, kl_coef=self.kl_coef, kl_estimator=estimator)
        return Loss(replace(spec, rollout_reduction="token"))

    def teacher(self, base: TeacherConfig) -> TeacherConfig:
        return replace(base, self=True, loss="reverse_kl", coef=self.coef)

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        credit = super().credit(rewards, demos, scale_rewards)
        return credit._replace(demo_weight=torch.zeros_like(credit.demo_weight))

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.0)
