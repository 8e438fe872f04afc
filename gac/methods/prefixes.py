"""Methods whose rollouts continue a prefix of the demonstration."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from gac.control.schedules import MixSchedule, ScheduleChoice
from gac.errors import require
from gac.fields import Count, NonNegative, Positive, Share
from gac.types import Mix, Observation, Sampling, Stage, State
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Sum
from .token_view import TokenView


@dataclass(frozen=True)
class UFT(Method, name="uft", family="hybrid", source="arXiv 2505.16984 and its code"):
    """GRPO on rollouts after a random hint, plus coef times the mean cross-entropy of hint tokens.

    The hint is the first j of `pieces` equal parts of the demonstration without its EOS. At step t,
    j is binomial with probability low + (high - low) (1 + cos(pi (t + 1) / hint_steps)) / 2; from
    step `hint_steps` on, there is no hint. The publication's parts are steps of the solution; the
    released code cuts it into at most five, here by tokens. All rollouts of a prompt have the same
    hint. The published KL term is `loss.kl_coef`, 0.001 in the released code.
    """

    coef: NonNegative = 0.001
    """Weight of the hints' cross-entropy, >= 0."""
    low: Share = 0.05
    """Probability of each part at the end of the curriculum, in [0, 1]."""
    high: Share = 0.95
    """Probability of each part at its start, in [0, 1]."""
    hint_steps: Count = 300
    """Number of steps with hints; the released code trains for 500 steps in total."""
    pieces: Count = 5
    """Number of parts of a demonstration."""
    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the hints."""

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight, demo_reduction="token"))

    def sampling(self, completions: int) -> Sampling:
        stage = Stage(completions, trained=completions, length=self.hint_tokens)
        return Sampling("prompt", (stage,))

    def hint_tokens(self, step: int, tokens: int, rng: random.Random) -> int:
        """Length of the hint from a demonstration of `tokens` tokens; see `Stage.length`."""
        if step >= self.hint_steps:
            return 0
        cosine = math.cos(math.pi * (step + 1) / self.hint_steps)
        probability = self.low + (self.high - self.low) * (1 + cosine) / 2
        pieces = min(self.pieces, tokens - 1)
        shown = sum(rng.random() < probability for _ in range(pieces))
        return round(shown / pieces * (tokens - 1)) if pieces else 0

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(self.coef, 1.0)


@dataclass(frozen=True)
class TRAPO(Sum, name="trapo", source="arXiv 2512.17636"):
    """Micro-groups of rollouts; after low rewards, the next group continues a demonstration prefix.

    Prefix tokens are trained by trust-region SFT with loss -p / max(p, c). The policy's own tokens
    are trained by RL, with advantages centered over the whole group and no clipping. All sums are
    divided by `loss.max_tokens`. Prefixes may end at any token rather than at a paragraph, and all
    micro-groups use the same demonstration.
    """

    sizes: tuple[int, ...] = (4, 2, 1, 1)
    """Rollouts of each micro-group; their sum must be `rollouts.num_generations`."""
    prefixes: tuple[float, ...] = (0.0, 0.2, 0.5, 1.0)
    """Fraction of the demonstration given to each micro-group as a prefix."""
    below: tuple[float, ...] = (-1.0, 0.5, 0.7, 0.9)
    """The prefix is given only if the mean reward so far is below this."""
    trained: tuple[int, ...] = (0, 1, 1, 1)
    """Number of rollouts per micro-group whose prefix is trained on, as in the released code."""
    trust: Positive = 0.1
    """c of the trust-region SFT, the publication's alpha."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = {len(self.sizes), len(self.prefixes), len(self.below), len(self.trained)}
        if len(counts) != 1 or not self.sizes or min(self.sizes) < 1:
            raise ValueError(
                f"sizes={self.sizes!r}: use numbers >= 1; the lists `sizes`, `prefixes`, `below` "
                "and `trained` must have the same length"
            )
        require(
            all(0 <= x <= 1 for x in self.prefixes),
            "prefixes",
            self.prefixes,
            "fractions in [0, 1]",
        )
        require(
            all(0 <= x <= size for x, size in zip(self.trained, self.sizes, strict=True)),
            "trained",
            self.trained,
            f"numbers from 0 to those of sizes={self.sizes!r}",
        )

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(
            base,
            demo_weight=DemoWeight.TRUST,
            demo_shape=self.trust,
            clip_low=None,
            clip_high=None,
            rollout_reduction="constant",
            demo_reduction="constant",
        )
        return Loss(spec, pooled=True)

    def sampling(self, completions: int) -> Sampling:
        if sum(self.sizes) != completions:
            raise ValueError(
                f"rollouts.num_generations={completions!r}: use {sum(self.sizes)}, the sum of "
                f"method.sizes={self.sizes!r}, or change the sizes"
            )
        rows = zip(self.sizes, self.prefixes, self.below, self.trained, strict=True)
        stages = [
            Stage(size, prefix, below if prefix else math.inf, trained)
            for size, prefix, below, trained in rows
        ]
        return Sampling("prompt", tuple(stages), advantages="centered")


@dataclass(frozen=True)
class PrefixRFT(Sum, name="prefix-rft", source="arXiv 2507.01679"):
    """Dr. GRPO; one of K rollouts continues a prefix, whose highest-entropy tokens are trained too.

    The prefix is the first floor(l T) of the demonstration's T tokens, at most T - 1, with l
    uniform between `low`, which falls over time, and `high`. Its tokens have the policy gradient
    -A p / p.detach() with the advantage A of their response, but only the share `top` with the
    highest entropies in each prefix. The publication does not give the number of steps of the
    schedule (`low.decay`, 500 by default, whatever `steps` is), nor the importance ratio of the
    prefix after the first update on the same rollouts, which is 1 here. The released code has
    further options for the prefix's advantage, a dual clip of 3 and an entropy bonus of 0.001,
    which are not implemented.
    """

    low: ScheduleChoice = MixSchedule(peak=0.95, valley=0.05, decay=500)
    """Smallest share of the demonstration that is given, as a function of the step."""
    high: Share = 0.95
    """Largest share of the demonstration that is given, in [0, 1]."""
    top: Share = 0.2
    """Share of a prefix's tokens that are trained on, in [0, 1]."""

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

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token."""
        batch = tokens.batch
        prefix = batch.live & batch.demo
        # rank of each prefix token in its sequence, the highest entropy first
        order = torch.where(prefix, -tokens.entropy, torch.inf).argsort(stable=True)
        order = order[batch.sequence[order].argsort(stable=True)]
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        # in float32, 0.6 * 25 is more than 15
        kept = rank - batch.offsets[batch.sequence] < self.top * (1 - 1e-6) * batch.spread(
            batch.per_sequence(prefix.float())
        )
        prefix_loss = -batch.advantages * (tokens.logps - tokens.logps.detach()).exp()
        return torch.where(prefix, torch.where(kept, prefix_loss, 0), tokens.policy_loss)
