"""How a method samples its rollouts. K is the number of rollouts per prompt."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Stage(NamedTuple):
    """Rollouts per prompt that are sampled together; later stages can depend on their rewards."""

    size: int
    """Rollouts per prompt."""
    prefix: float = 0.0
    """Fraction, in [0, 1], of the prompt's demonstration that is given as a prefix to continue."""
    below: float = math.inf
    """The prefix is given only while the mean reward of the earlier stages is below this."""
    trained: int = 0
    """Number of rollouts, from the end of the stage, whose prefix is trained on as a
    demonstration."""
    length: Callable[[int, int, random.Random], int] | None = None
    """Used instead of `prefix`: length(step, tokens, rng) returns the number of prefix tokens for a
    demonstration of `tokens` tokens. The stage's rollouts of one prompt share the prefix."""

    @property
    def has_prefix(self) -> bool:
        """Whether rollouts may continue a prefix of a demonstration."""
        return self.prefix > 0 or self.length is not None


@dataclass(frozen=True)
class Sampling:
    """How prompts and demonstrations become training rows, in every step of a run."""

    demos: Literal["separate", "prompt"] = "separate"
    """"separate": a batch from the demonstration set in every step that uses demonstrations.
    "prompt": the demonstrations of the sampled prompts themselves."""
    stages: tuple[Stage, ...] = ()
    """How the K rollouts of a prompt are sampled; empty: all in one stage."""
    from_reference: bool = False
    """Sample the rollouts from the frozen initial policy."""
    pairs: bool = False
    """Keep only each prompt's best and worst rollout, with advantages 1 and -1."""
    groups: bool = False
    """All rollouts of a prompt stay in one micro-batch; a prompt with a dropped rollout has no
    group.
    """
    demo_in_group: bool = False
    """Demonstrations are scored and share the baseline of their prompt's rollouts."""
    teacher: bool = False
    """Measure the policy's log-probs of the rollouts when it has also seen the prompt's
    demonstration; see `Row.context`."""
    collect: int = 0
    """With demos="prompt": collect the demonstrations that `Method.credit` selects, over several
    steps, and train on this many in one step once there are enough; 0: train on them at once."""
    advantages: str | None = None
    """Normalization of the rewards, see `group_advantages`; None: `rollouts.scale_rewards`."""
    demo_tokens: int | None = None
    """Tokens at the end of a demonstration that have a loss; None: all."""
    limit_demos: int | None = None
    """Use only this many demonstrations, from the start of the set; None: all."""
    epochs: int | None = None
    """End the run after this many passes over the demonstrations; None: no such limit."""

    def unit(self, completions: int) -> int:
        """Number of rollouts that must share a micro-batch; `completions`: rollouts per prompt."""
        return completions if self.groups else 1 + self.pairs
