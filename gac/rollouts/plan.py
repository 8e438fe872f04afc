"""What a method may ask of the sampling, as values. Legend: K rollouts per prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Stage(NamedTuple):
    """Some of the rollouts of each prompt, drawn together; later stages see earlier rewards."""

    size: int
    """Rollouts."""
    prefix: float = 0.0
    """Share of the prompt's demonstration that is given before the policy continues, [0, 1]."""
    below: float = math.inf
    """The prefix is given only while the mean reward of the earlier stages is below this."""
    trained: int = 0
    """Number of rollouts, the last ones of the stage, whose prefix is learnt as a demonstration."""


@dataclass(frozen=True)
class Sampling:
    """How prompts and demonstrations become rows to learn from, in every step of a run."""

    demos: Literal["apart", "prompt"] = "apart"
    """"apart": a batch of the demonstrations' own set in every step that reads demonstrations.
    "prompt": the demonstrations of the sampled prompts themselves."""
    stages: tuple[Stage, ...] = ()
    """How the K rollouts of a prompt are drawn; empty: all at once."""
    from_reference: bool = False
    """The rollouts are drawn from the frozen initial policy."""
    pairs: bool = False
    """Of each prompt only a best and a worst rollout are kept, with advantages 1 and -1."""
    demo_in_group: bool = False
    """Demonstrations are scored and share the baseline of their prompt's rollouts."""
    advantages: str | None = None
    """Normalisation of the rewards, see `group_advantages`; None: the run's own."""
    demo_tokens: int | None = None
    """Tokens at the end of a demonstration that have a loss; None: all."""
    limit_demos: int | None = None
    """Largest number of demonstrations used, the first ones of the set; None: all."""
    epochs: int | None = None
    """Passes over the demonstrations after which the run ends early; None: it does not."""
