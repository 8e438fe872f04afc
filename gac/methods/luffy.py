"""LUFFY: a demonstration as one more, off-policy, member of each prompt's group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from gac_kernels import DemoWeight, LossSpec

from .base import Method, Mix, Observation, Stage, State


@dataclass(frozen=True)
class LUFFY(Method):
    """Each group holds K - 1 rollouts and the prompt's demonstration, whose loss is -A p / (p + c).

    The baseline is the mean reward of the whole group, without its deviation; no clip; the sum of
    all tokens' losses over rows times `loss.max_tokens`. All as in the released training script.
    """

    name: ClassVar[str] = "luffy"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2504.14945"
    demos: ClassVar[str] = "prompt"
    demo_in_group: ClassVar[bool] = True
    pooled: ClassVar[bool] = True

    shape: float = 0.1
    """c of the shaped probability p / (p + c), the publication's gamma."""
    entropy_coef: float = 0.001
    """Weight of the entropy bonus on rollouts."""
    weight: DemoWeight = DemoWeight.SHAPED
    """Token weight of the demonstrations; any but shaped leaves out their advantage."""

    def spec(self, base: LossSpec) -> LossSpec:
        return replace(
            base, demo_weight=self.weight, demo_shape=self.shape, clip_low=None, clip_high=None,
            entropy_coef=self.entropy_coef, rollout_reduction="constant",
            demo_reduction="constant",
        )  # fmt: skip

    def stages(self, completions: int) -> Sequence[Stage]:
        if completions < 2:
            raise ValueError(
                f"rollouts.completions={completions!r}: use 2 or more, one is the demonstration"
            )
        return (Stage(completions - 1),)

    def advantages(self, rewards: Tensor, demos: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        return super().advantages(rewards, demos, "centered")

    def mix(self, state: State, seen: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(1.0, 1.0)
