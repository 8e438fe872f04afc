"""KDRL: the policy gradient plus a reverse KL to a teacher, whose weight falls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gac.fields import Count, NonNegative
from gac.types import Mix, Observation, State, StepNeeds
from gac_kernels import LossSpec

from .base import Loss, Method
from .teacher import TeacherConfig


@dataclass(frozen=True)
class KDRL(
    Method,
    name="kdrl",
    family="teacher",
    source="arXiv 2506.02208",
    cost="the teacher's forward pass on the rollouts",
):
    """GRPO plus the k2 estimate of the reverse KL to a teacher, with a falling weight.

    Both terms are means over all tokens. This is the variant with an annealed weight; the masks
    that leave out correct responses are not implemented.
    """

    coef: NonNegative = 5e-3
    """Weight of the KL in the first step."""
    final_coef: NonNegative = 1e-3
    """Weight of the KL after `anneal_steps`; it changes linearly."""
    anneal_steps: Count | None = None
    """Number of steps in which the weight changes; null: all steps of the run."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(demos=False, teacher=True)

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, rollout_reduction="token"))

    def teacher(self, base: TeacherConfig) -> TeacherConfig:
        return replace(base, loss="k2", coef=self.coef)

    def for_run(self, steps: int) -> Self:
        return replace(self, anneal_steps=self.anneal_steps or steps)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        done = min(last.step / (self.anneal_steps or 1), 1.0)
        return state, Mix(0.0, teacher=self.coef + done * (self.final_coef - self.coef))
