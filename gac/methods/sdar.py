"""SDAR: RL plus gated distillation; the teacher is the policy with the demo in its prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gac.errors import require
from gac.rollouts.advantages import Credit
from gac.rollouts.plan import Sampling
from gac_kernels import LossSpec

from .base import Loss, Method, Mix, Observation, State

if TYPE_CHECKING:
    from gac.methods.token_loss import TokenView


@dataclass(frozen=True)
class SDAR(Method):
    """GRPO plus coef sigmoid(beta D) D on rollout tokens; D is the teacher's log-prob minus log p.

    The teacher is the policy itself before the update, with privileged information before the
    prompt. The gate sigmoid(beta D) is detached, so the gradient is that of -coef * gate * log p.
    Both losses are means over tokens. In the publication the information is a skill retrieved for
    an agent's task; here it is the prompt with its demonstration, followed by the prompt again.
    Prompts without a demonstration are trained by RL only. The released scripts add a KL term of
    0.001 and a penalty for invalid actions, which are not implemented.
    """

    name: ClassVar[str] = "sdar"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2605.15155 and its code"
    cost: ClassVar[str] = "forward pass on the rollouts with the demonstration before them"

    coef: float = 0.01
    """Weight of the distillation; 0.01 in the released scripts."""
    beta: float = 5.0
    """Sharpness of the gate, >= 0; 0: a constant gate of 1/2."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.coef), "coef", self.coef, "a finite number")
        require(self.beta >= 0, "beta", self.beta, "a number >= 0")

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(base, rollout_reduction="token")
        return Loss(spec, token=self.token_loss, policy=True, per_token=True)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", teacher=True)

    def credit(self, rewards: torch.Tensor, demos: torch.Tensor | None, kind: str) -> Credit:
        credit = super().credit(rewards, demos, kind)
        return credit._replace(demo_weight=torch.zeros_like(credit.demo_weight))

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.0)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token."""
        if tokens.teacher is None:  # a batch without rollouts, so no token has a loss
            return tokens.logps
        gap = torch.where(tokens.teacher.isnan(), 0, tokens.teacher - tokens.logps)
        gate = (self.beta * gap.detach()).sigmoid()
        return tokens.policy_loss + self.coef * gate * gap
