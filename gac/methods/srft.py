"""SRFT: SFT and RL on demonstrations and rollouts at once, weighted by entropy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gac.rollouts.advantages import Credit
from gac.rollouts.plan import Sampling
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State

if TYPE_CHECKING:
    from gac.methods.token_loss import TokenView


@dataclass(frozen=True)
class SRFT(Method):
    """Demonstrations: entropy-weighted cross-entropy plus policy gradient; rollouts: signed log p.

    H is the mean token entropy of a response. The loss is 0.5 exp(-H) (-log p) - A p for
    demonstrations, 0.1 exp(H) (-log p) for correct rollouts and log p for incorrect ones. It is
    averaged over the tokens of each term.
    """

    name: ClassVar[str] = "srft"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2506.19767, equations 5 to 13"

    sft_scale: float = 0.5
    """Factor of exp(-H) in the SFT weight."""
    rl_scale: float = 0.1
    """Factor of exp(H) in the weight of correct rollouts."""
    shape: float | None = None
    """c: use -A p / (p + c) as the RL loss of demonstrations, as in a public implementation."""
    correct: float = 0.5
    """A rollout is correct if its reward is above this."""
    least_logp: float | None = None
    """Log-probability below which tokens of incorrect rollouts have no gradient; null (published):
    no limit.
    """

    def loss(self, base: LossSpec) -> Loss:
        # SHAPED only makes the demonstrations' advantages available; the loss is `token_loss`
        spec = replace(
            base, demo_weight=DemoWeight.SHAPED, rollout_reduction="token", demo_reduction="token"
        )
        return Loss(spec, token=self.token_loss)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", demo_in_group=True, advantages="std")

    def credit(self, rewards: torch.Tensor, demos: torch.Tensor | None, kind: str) -> Credit:
        signs = torch.where(rewards > self.correct, 1.0, -1.0)
        signs = torch.where(rewards.isnan(), 0.0, signs).double()
        return super().credit(rewards, demos, kind)._replace(rollouts=signs)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(1.0, 1.0)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token."""
        batch, logps = tokens.batch, tokens.logps
        entropy = batch.spread(tokens.sequence_mean(tokens.entropy))
        p = logps.exp()
        policy = p if self.shape is None else p / (p + self.shape)
        demo_loss = -self.sft_scale * (-entropy).exp() * logps - batch.advantages * policy
        correct, incorrect = batch.advantages > 0, batch.advantages < 0
        floored_logps = logps if self.least_logp is None else logps.clamp(min=self.least_logp)
        rollout_loss = torch.where(correct, -self.rl_scale * entropy.exp() * logps, 0)
        rollout_loss = torch.where(incorrect, floored_logps, rollout_loss)
        return torch.where(batch.demo, demo_loss, rollout_loss)
