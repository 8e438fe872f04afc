"""DYPO: SFT on unsolved prompts, RL and a contrastive loss on partly solved ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gac.errors import require
from gac.rollouts.advantages import Credit
from gac.rollouts.plan import Sampling
from gac_kernels import LossSpec

from .base import Loss, Method, Mix, Observation, State, StepNeeds

if TYPE_CHECKING:
    from gac.methods.token_loss import TokenView


@dataclass(frozen=True)
class DYPO(Method):
    """SFT if all rollouts fail, nothing if all succeed, else alpha GRPO + (1 - alpha) GAL.

    GAL, the group alignment loss, is the mean of -log sigmoid(beta (h_i - h_j)) over the pairs of a
    successful rollout i and a failed one j of a prompt, where h is the sum over tokens of log p
    minus the reference's log-prob. With rewards other than 0 and 1, rollouts above the mean of
    their group are successful in GAL.

    Each term is the mean over its own prompts, and the terms are added; the publication's mean over
    all prompts also weights them by the shares of unsolved and partly solved prompts. The
    publication gives no value of `sft_coef`. Its several teachers become rows of the data set with
    the same prompt. Its KL term is not implemented, and a prompt with a dropped rollout is not
    trained by RL.
    """

    name: ClassVar[str] = "dypo"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2604.08926, equations 20 to 24"
    cost: ClassVar[str] = "reference forward pass on the rollouts"

    alpha: float = 0.5
    """Share of GRPO in the RL loss, in [0, 1]."""
    beta: float = 1.0
    """Factor of the log-ratios in GAL, > 0."""
    sft_coef: float = 1.0
    """Factor of the SFT loss, > 0; the publication's gamma."""
    correct: float = 0.5
    """A rollout succeeds if its reward is above this."""

    def __post_init__(self) -> None:
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "a number in [0, 1]")
        require(self.beta > 0, "beta", self.beta, "a number > 0")
        require(self.sft_coef > 0, "sft_coef", self.sft_coef, "a number > 0")

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(kl=True)

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(base, demo_reduction="token", rollout_reduction="sequence")
        return Loss(spec, token=self.token_loss, policy=True)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", groups=True)

    def credit(self, rewards: torch.Tensor, demos: torch.Tensor | None, kind: str) -> Credit:
        successes = (rewards > self.correct).sum(1)
        failures = (rewards <= self.correct).sum(1)  # nan, a dropped rollout, is neither
        mid = ((successes > 0) & (failures > 0)).to(rewards.dtype)
        hard = (successes == 0).to(rewards.dtype)
        credit = super().credit(rewards, demos, kind)
        return credit._replace(rollout_weight=mid, demo_weight=hard)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(self.sft_coef, 1.0)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token; for GAL, the loss of the token's group."""
        batch = tokens.batch
        if batch.ref is None:
            raise ValueError(
                "ref_logps=None: GAL needs the reference's log-probs; unset kl_sample_size"
            )
        assert tokens.units is not None  # every batch of rows has units
        h = batch.per_sequence(torch.where(batch.rollout, tokens.logps - batch.ref, 0))
        sign = batch.per_sequence(batch.advantages).sign()
        units = tokens.units.to(h.device)
        same = units[:, None] == units[None]
        pairs = (same & (sign[:, None] > 0) & (sign[None] < 0)).to(h.dtype)
        losses = -torch.nn.functional.logsigmoid(self.beta * (h[:, None] - h[None]))
        group = same.to(h.dtype)
        gal = group @ (pairs * losses).sum(1) / (group @ pairs.sum(1)).clamp(min=1)
        rl = self.alpha * tokens.policy_loss + (1 - self.alpha) * batch.spread(gal)
        return torch.where(batch.demo, -tokens.logps, rl)
