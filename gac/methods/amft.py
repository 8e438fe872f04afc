"""AMFT: updates mu by the reward's derivative w.r.t. mu plus the entropy's gap to its target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from gac.errors import require

from .base import Mix, Observation, State, StepNeeds, TokenWeighted, Weights
from .gram_solver import cross_gram


@dataclass(frozen=True)
class AMFT(TokenWeighted):
    """After a warm-up with SFT only, mu += meta_lr dU/dmu + entropy_lr (H* - H), clipped.

    U is the expected reward after a step of plain gradient descent with this mu. Its derivative is
    lr <g_v, g_s - g_r>. Here g_s and g_r are the gradients of the two losses, and g_v is the
    gradient of the RL loss on other prompts: a batch is split in two halves, and the result is
    averaged over both ways to assign them. dU/dmu is measured every `update_every` steps. H is the
    mean entropy of the rollouts at every step; H* is its value at the first step with rollouts.

    The released code uses PPO with a value head, takes H* from the demonstrations, and uses the
    cross-entropy of a validation set instead of the reward; there, the sign of dU/dmu is reversed.
    With the learning rates of that code, the product meta_lr lr is 1e-10, so the entropy determines
    mu.
    """

    name: ClassVar[str] = "amft"
    family: ClassVar[str] = "rule"
    source: ClassVar[str] = "arXiv 2508.06944v1 and its code"
    cost: ClassVar[str] = "second gradient buffer, on measurement steps"

    warmup: int = 50
    """Steps with demonstrations only, at the start."""
    mu_init: float = 0.8
    """mu of the first step after the warm-up."""
    mu_min: float = 0.05
    """Smallest mu after the warm-up."""
    mu_max: float = 0.95
    """Largest mu after the warm-up."""
    meta_lr: float = 1e-4
    """Step size of the meta-gradient."""
    entropy_lr: float = 5e-4
    """Step size of the entropy term, in 1 / nats."""
    update_every: int = 20
    """Steps between measurements of the meta-gradient."""

    def __post_init__(self) -> None:
        require(self.warmup >= 0, "warmup", self.warmup, "a number >= 0")
        require(self.update_every >= 1, "update_every", self.update_every, "a number >= 1")
        for name in ("meta_lr", "entropy_lr"):
            value = getattr(self, name)
            require(math.isfinite(value), name, value, "a finite number")
        if not 0 <= self.mu_min <= self.mu_init <= self.mu_max <= 1:
            raise ValueError(
                f"mu_min={self.mu_min!r}, mu_init={self.mu_init!r}, mu_max={self.mu_max!r}: "
                "use 0 <= mu_min <= mu_init <= mu_max <= 1"
            )

    def needs(self, step: int) -> StepNeeds:
        if step < self.warmup:
            return StepNeeds(rollouts=False)
        return StepNeeds(parts=2 * ((step - self.warmup) % self.update_every == 0))

    def init(self) -> State:
        return {"mu": self.mu_init, "target": None, "slope": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        if last.step < self.warmup:
            return state, Mix(1.0)
        mu, entropy = state["mu"], last.entropy
        target, slope, lr = state["target"], state["slope"] or 0.0, last.lr or 0.0
        if entropy is not None and math.isfinite(entropy):
            target = entropy if target is None else target
            mu += self.meta_lr * lr * slope + self.entropy_lr * (target - entropy)
            mu = min(max(mu, self.mu_min), self.mu_max)
        return {"mu": mu, "target": target, "slope": None}, Mix(mu)

    def solve(self, state: State, gram: torch.Tensor, mix: Mix) -> tuple[State, Weights | None]:
        (_, sr), (rs, rr) = cross_gram(gram, 2)
        return {**state, "slope": (sr + rs) / 2 - rr}, mix.pair

    def report(self, state: State) -> dict[str, float | None]:
        return {"reward_slope": state["slope"], "entropy_target": state["target"]}
