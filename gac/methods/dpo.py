"""DPO and IPO on pairs of graded responses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gac.fields import Positive
from gac.types import Mix, Observation, Sampling, State, StepNeeds
from gac_kernels import LossSpec

from .base import Loss, Method
from .token_view import TokenView


@dataclass(frozen=True)
class Preference(Method, family="preference", cost="reference forward pass on the pairs"):
    """Trains the policy to prefer a prompt's best response over its worst.

    Responses are sampled from the reference policy, or are those of a fixed dataset, as in the
    publications, with `rollouts.function=gac.rollouts.stored:stored_pairs`. Prompts whose responses
    all get the same reward are skipped.
    """

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(demos=False, kl=True)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(from_reference=True, pairs=True)

    def loss(self, base: LossSpec) -> Loss:
        # both rows of a pair carry the pair's loss, so this is the mean over pairs
        return Loss(replace(base, rollout_reduction="sequence"), token=self.token_loss)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.0)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token: the loss of the pair that contains the token."""
        batch = tokens.batch
        if batch.ref is None:
            raise ValueError("ref_logps=None: pairs need the reference's log-probs")
        ratios = self.sequence_ratios(tokens, torch.where(batch.live, tokens.logps - batch.ref, 0))
        if len(ratios) % 2:  # a rank without pairs has an empty batch
            return tokens.logps  # no token has a loss
        loss = self.pair_loss(ratios[0::2] - ratios[1::2])
        return batch.spread(loss.repeat_interleave(2))

    def sequence_ratios(self, tokens: TokenView, ratios: torch.Tensor) -> torch.Tensor:
        """Log-ratio of each response to the reference, [N] -> [S]."""
        return tokens.batch.per_sequence(ratios)

    def pair_loss(self, h: torch.Tensor) -> torch.Tensor:
        """Loss [S / 2] of each pair from the difference of its two log-ratios."""
        raise NotImplementedError


@dataclass(frozen=True)
class DPO(Preference, name="dpo", source="arXiv 2305.18290, equation 7"):
    """Trains the policy to prefer a prompt's best response over its worst: -log sigmoid(beta h).

    h is the difference of the two log-ratios to the reference, summed over tokens. The responses
    are sampled from the reference policy.
    """

    beta: Positive = 0.1
    """Strength of the pull towards the reference policy, > 0."""

    def pair_loss(self, h: torch.Tensor) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(self.beta * h)


@dataclass(frozen=True)
class IPO(Preference, name="ipo", source="arXiv 2310.12036, equation 17"):
    """DPO with another loss: the squared distance of h (see `dpo`) from 1 / (2 tau)."""

    tau: Positive = 0.5
    """The target difference of the log-ratios is 1 / (2 tau) nats, tau > 0."""
    normalize: bool = True
    """Divide each log-ratio by its response length, as common libraries do; published: sums."""

    def sequence_ratios(self, tokens: TokenView, ratios: torch.Tensor) -> torch.Tensor:
        if self.normalize:
            return tokens.sequence_mean(ratios)
        return super().sequence_ratios(tokens, ratios)

    def pair_loss(self, h: torch.Tensor) -> torch.Tensor:
        return (h - 1 / (2 * self.tau)) ** 2
