"""LUFFY: adds the demonstration to each prompt's group as an off-policy rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gac.rollouts.plan import Sampling, Stage
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State


@dataclass(frozen=True)
class LUFFY(Method):
    """Each group has K - 1 rollouts and the prompt's demonstration, whose loss is -A p / (p + c).

    As in the released training script, the baseline is the mean reward of the whole group,
    advantages are not divided by the standard deviation, and nothing is clipped. The sum of all
    token losses is divided by rows times `loss.max_tokens`.
    """

    name: ClassVar[str] = "luffy"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2504.14945"

    shape: float = 0.1
    """c of the shaped probability p / (p + c), the publication's gamma."""
    entropy_coef: float = 0.001
    """Weight of the entropy bonus on rollouts."""
    weight: DemoWeight = DemoWeight.SHAPED
    """Token weight of the demonstrations; all except shaped ignore the advantage."""

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(
            base,
            demo_weight=self.weight,
            demo_shape=self.shape,
            clip_low=None,
            clip_high=None,
            entropy_coef=self.entropy_coef,
            rollout_reduction="constant",
            demo_reduction="constant",
        )
        return Loss(spec, pooled=True)

    def sampling(self, completions: int) -> Sampling:
        if completions < 2:
            raise ValueError(
                f"rollouts.num_generations={completions!r}: use 2 or more; one is the demonstration"
            )
        group = (Stage(completions - 1),)
        return Sampling("prompt", group, demo_in_group=True, advantages="centered")

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(1.0, 1.0)
