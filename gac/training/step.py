"""One optimiser step as values: what goes in, what its passes find, what becomes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from gac.control.evidence import Norms, Sketches
from gac.data.rows import Counts, Row
from gac.methods.base import Mix, Needs
from gac.pair import Pair
from gac_kernels import TokenMoments

from .gradient_parts import GradientParts


class Rewards(NamedTuple):
    """The rewards of a step's rollouts, those that are not learnt from too, as sums."""

    number: float
    total: float
    squares: float

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Rewards:
        """The sums over `rewards`."""
        return cls(float(len(rewards)), sum(rewards), sum(r * r for r in rewards))

    @property
    def mean(self) -> float | None:
        """None without a reward."""
        return self.total / self.number if self.number else None

    @property
    def variance(self) -> float | None:
        """Population variance; None without a reward."""
        if not self.number:
            return None
        mean = self.total / self.number
        return self.squares / self.number - mean * mean  # ** raises where it overflows


@dataclass(frozen=True)
class Step:
    """All that the gradient of one optimiser step depends on, beside the weights."""

    number: int
    """Optimiser steps before it."""
    rows: tuple[Row, ...]
    """What this rank learns from."""
    mix: Mix
    """The weights of the two terms."""
    counts: Counts
    """Of the rows of all ranks: what the terms are divided by."""
    rewards: Rewards
    """Of the rollouts of all ranks."""
    needs: Needs
    """What is measured."""
    old_logps: tuple[Tensor, ...]
    """Log-probs of the sampling policy by `Row.sequence`; empty: on-policy."""
    seed: int
    """Of the dropout masks."""
    sketch_seed: int = 0
    """Of the head sketch, the same on every rank."""

    def plain(self) -> dict[str, Any]:
        """Built-in types and tensors only, for `restore`."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "rows": [tuple(row) for row in self.rows],
            **{key: tuple(getattr(self, key)) for key in _TUPLES},
        }

    @classmethod
    def restore(cls, plain: dict[str, Any]) -> Step:
        """Inverse of `plain`."""
        named = {key: kind(*plain[key]) for key, kind in _TUPLES.items()}
        return cls(**{**plain, **named, "rows": tuple(Row(*row) for row in plain["rows"])})


_TUPLES: dict[str, Any] = {"mix": Mix, "counts": Counts, "rewards": Rewards, "needs": Needs}


@dataclass(frozen=True)
class Measured:
    """What the passes of one step found; all but `parts` is the same on every rank."""

    losses: Pair
    """The two reduced terms."""
    moments: TokenMoments
    """Statistics of the step's tokens."""
    parts: GradientParts | None = None
    """The separate gradients, still to be combined."""
    gram: Tensor | None = None
    """float64 [2 n, 2 n] inner products of the `parts`."""
    bias_gram: Tensor | None = None
    """[4, 4] of SFT, RL, and both without phi and clip."""
    sketches: Sketches | None = None
    """Of every unit's gradient of the head's weight."""
    norms: Norms | None = None
    """Of the accumulated gradient, micro-batch by micro-batch."""
    kl: float | None = None
    """Mean k3 KL to the reference of a sample of the rollouts; None: `moments` has that of all."""

    @property
    def broken(self) -> bool:
        """Whether an inner product is not finite, so that no weights can be found."""
        return self.gram is not None and not bool(self.gram.isfinite().all())


class Update(NamedTuple):
    """What became of a step."""

    mix: Mix
    """The weights that the gradient was made with."""
    norm: float
    """Of the gradient, before the clip."""
    lr: float
    fault: str | None
    """Why the step was skipped, if it was."""

    @property
    def applied(self) -> bool:
        """Whether the optimiser moved the weights."""
        return self.fault is None
