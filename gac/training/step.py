"""One optimizer step as data: its inputs, its measurements and its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from gac.control.evidence import Evidence
from gac.control.term_pair import TermPair
from gac.data.rows import Counts, Row
from gac.methods.base import Mix, StepNeeds
from gac_kernels import TokenMoments

from .probes.parts import GradientParts


class Rewards(NamedTuple):
    """Sums over the rewards of a step's rollouts, including those that are not trained on."""

    number: float
    total: float
    squares: float

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Rewards:
        """The sums over `rewards`."""
        return cls(float(len(rewards)), sum(rewards), sum(r * r for r in rewards))

    @property
    def mean(self) -> float | None:
        """Mean reward; None if there are no rewards."""
        return self.total / self.number if self.number else None

    @property
    def variance(self) -> float | None:
        """Population variance; None if there are no rewards."""
        if not self.number:
            return None
        mean = self.total / self.number
        return self.squares / self.number - mean * mean  # `mean**2` would raise OverflowError


@dataclass(frozen=True)
class Step:
    """Everything that the gradient of one optimizer step depends on, except the model's weights."""

    number: int
    """Index of the step, from 0."""
    rows: tuple[Row, ...]
    """This rank's training rows."""
    mix: Mix
    """The weights of the two terms."""
    counts: Counts
    """Row and token counts over all ranks, by which the terms are divided."""
    rewards: Rewards
    """Rewards of all ranks' rollouts."""
    needs: StepNeeds
    """What the step must measure."""
    old_logps: tuple[Tensor, ...]
    """Log-probs of the sampling policy by `Row.sequence`; empty: on-policy."""
    seed: int
    """Seed of the dropout masks."""
    sketch_seed: int = 0
    """Seed of the head sketch, the same on every rank."""
    teacher_logps: tuple[Tensor, ...] = ()
    """Log-probs of the policy that sees `Row.context`, by `Row.sequence`; empty: not measured."""

    def plain(self) -> dict[str, Any]:
        """Convert to built-in types and tensors, for `restore`."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "rows": [tuple(row) for row in self.rows],
            **{key: tuple(getattr(self, key)) for key in _TUPLES},
        }

    @classmethod
    def restore(cls, plain: dict[str, Any]) -> Step:
        """Inverse of `plain`."""
        # steps saved by earlier versions have more fields in `needs`
        named = {key: kind(*plain[key][: len(kind._fields)]) for key, kind in _TUPLES.items()}
        return cls(**{**plain, **named, "rows": tuple(Row(*row) for row in plain["rows"])})


_TUPLES: dict[str, Any] = {"mix": Mix, "counts": Counts, "rewards": Rewards, "needs": StepNeeds}


@dataclass(frozen=True)
class Measured:
    """Results of a step's forward and backward passes; the same on all ranks, except `parts`."""

    losses: TermPair
    """The two loss terms, reduced over all ranks."""
    moments: TokenMoments
    """Statistics of the step's tokens."""
    kl: float | None = None
    """Mean k3 KL to the reference over a subset of the rollouts; None: `moments.kl`, over all."""
    parts: GradientParts | None = None
    """The separate gradients, still to be combined."""
    gram: Tensor | None = None
    """float64 [2 n, 2 n] inner products of the `parts`."""
    evidence: Evidence | None = None
    """Input of the signal source, if `StepNeeds.signals` is set."""
    sources: tuple[str, ...] | None = None
    """The source of each entry of `moments.demo_nll`, if `StepNeeds.sources` is set."""

    @property
    def non_finite(self) -> bool:
        """Whether `gram` has an entry that is not finite, which the solver cannot handle."""
        return self.gram is not None and not bool(self.gram.isfinite().all())


class Update(NamedTuple):
    """The applied update, or why the step was skipped."""

    mix: Mix
    """The weights with which the gradient was computed."""
    norm: float
    """Gradient norm before clipping."""
    lr: float
    """Learning rate."""
    fault: str | None
    """Why the step was skipped; None if it was applied."""

    @property
    def applied(self) -> bool:
        """Whether the optimizer step was applied."""
        return self.fault is None
