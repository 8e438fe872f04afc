"""Prefix-RFT: one rollout per group continues a prefix of the demonstration."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gac.control.schedules import MixSchedule, ScheduleChoice
from gac.errors import require
from gac.rollouts.plan import Sampling, Stage
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Mix, Observation, State

if TYPE_CHECKING:
    from gac.methods.token_loss import TokenView


@dataclass(frozen=True)
class PrefixRFT(Method):
    """Dr. GRPO; one of K rollouts continues a prefix, whose highest-entropy tokens are trained too.

    The prefix is the first floor(l T) of the demonstration's T tokens, at most T - 1, with l
    uniform between `low`, which falls over the run, and `high`. Its tokens have the policy gradient
    -A p / p.detach() with the advantage A of their response, but only the share `top` with the
    highest entropies in each prefix. The publication does not give the number of steps of the
    schedule, which covers the run here, nor the importance ratio of the prefix after the first
    update on the same rollouts, which is 1 here. The released code has further options for the
    prefix's advantage, a dual clip of 3 and an entropy bonus of 0.001, which are not implemented.
    """

    name: ClassVar[str] = "prefix-rft"
    family: ClassVar[str] = "hybrid"
    source: ClassVar[str] = "arXiv 2507.01679"

    low: ScheduleChoice = MixSchedule(peak=0.95, valley=0.05, decay=500)
    """Smallest share of the demonstration that is given, as a function of the step."""
    high: float = 0.95
    """Largest share, in [0, 1]."""
    top: float = 0.2
    """Share of a prefix's tokens that are trained on, in [0, 1]."""

    def __post_init__(self) -> None:
        require(0 <= self.high <= 1, "high", self.high, "a number in [0, 1]")
        require(0 <= self.top <= 1, "top", self.top, "a number in [0, 1]")

    def loss(self, base: LossSpec) -> Loss:
        # SHAPED only makes the prefixes' advantages available; the loss is `token_loss`
        spec = replace(
            base,
            demo_weight=DemoWeight.SHAPED,
            rollout_reduction="constant",
            demo_reduction="constant",
        )
        return Loss(spec, token=self.token_loss, policy=True, pooled=True)

    def sampling(self, completions: int) -> Sampling:
        if completions < 2:
            raise ValueError(
                f"rollouts.num_generations={completions!r}: use 2 or more; one continues a prefix"
            )
        stages = Stage(completions - 1), Stage(1, trained=1, length=self.prefix_tokens)
        return Sampling("prompt", stages, advantages="centered")

    def prefix_tokens(self, step: int, tokens: int, rng: random.Random) -> int:
        """Length of the prefix of a demonstration of `tokens` tokens; see `Stage.length`."""
        share = rng.uniform(min(self.low(step), self.high), self.high)
        return min(math.floor(share * tokens), tokens - 1)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(1.0, 1.0)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token."""
        batch = tokens.batch
        prefix = batch.live & batch.demo
        # rank of each prefix token in its sequence, the highest entropy first
        order = torch.where(prefix, -tokens.entropy, torch.inf).argsort(stable=True)
        order = order[batch.sequence[order].argsort(stable=True)]
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        rank = rank - batch.offsets[batch.sequence]
        kept = rank < torch.ceil(self.top * batch.spread(batch.per_sequence(prefix.float())))
        prefix_loss = -batch.advantages * (tokens.logps - tokens.logps.detach()).exp()
        return torch.where(prefix, torch.where(kept, prefix_loss, 0), tokens.policy_loss)
