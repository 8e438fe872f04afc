"""GRPO, which trains on rollouts only, and its variants."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gac.fields import NonNegative, Share
from gac.types import Mix, Observation, Sampling, State, StepNeeds
from gac_kernels import LossSpec

from .base import Loss, Method


@dataclass(frozen=True)
class GRPO(Method, name="grpo", family="single signal", source="arXiv 2402.03300"):
    """The clipped policy gradient with group-relative advantages; no demonstrations."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(demos=False)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.0)


@dataclass(frozen=True)
class DrGRPO(GRPO, name="dr-grpo", source="arXiv 2503.20783"):
    """GRPO without normalization by the group's standard deviation or the response length.

    Every response counts as `loss.max_tokens` tokens (default: the maximum completion length).
    """

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, rollout_reduction="constant"))

    def sampling(self, completions: int) -> Sampling:
        return Sampling(advantages="centered")


@dataclass(frozen=True)
class DAPO(GRPO, name="dapo", source="arXiv 2503.14476"):
    """GRPO with a higher upper clip, no KL, and a mean over all tokens.

    Groups with equal rewards have no gradient, but they are not resampled as in the publication.
    """

    clip_low: Share = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped above at 1 + clip_high."""

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(
            base,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            kl_coef=0.0,
            rollout_reduction="token",
        )
        return Loss(spec)


@dataclass(frozen=True)
class GSPO(GRPO, name="gspo", source="arXiv 2507.18071, equations 5 to 7"):
    """GRPO with one ratio per response: the geometric mean of its tokens' ratios, clipped.

    The clip only takes effect if rollouts are reused (`rollouts.num_iterations` > 1).
    """

    clip_low: Share = 3e-4
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegative = 4e-4
    """The ratio is clipped above at 1 + clip_high."""

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(
            base,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            importance_sampling_level="sequence",
            rollout_reduction="sequence",
        )
        return Loss(spec)
