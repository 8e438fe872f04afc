"""The gate: how much of the proposed mu the rewards let through.

Demonstrations that teach what rewards confirm have a gradient with a positive inner product with
that of the rewards. It turns negative when they are wrong, or when the policy is better than they
are; then mu should fall, however much noise the gradients have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gac.checks import is_real, numbers, require

from .alignment import Alignment

FORMS = {"cosine": (0.5, 2.5), "mean_cosine": (0.6, 3.0), "z": (1.0, 0.5)}
"""Form -> (trust where the measure is 0, rise of the trust per unit of it)."""


class GateState(NamedTuple):
    """Averages of the `Alignment`, by its names, and the trust in force."""

    inner: float
    inner_variance: float
    sft_square: float
    rl_square: float
    trust: float

    @property
    def cosine(self) -> float:
        """Cosine of both gradients, in [-1, 1]; 0 while noise hides one of them."""
        if self.sft_square <= 0 or self.rl_square <= 0:
            return 0.0
        size = math.sqrt(self.sft_square) * math.sqrt(self.rl_square)
        return min(max(self.inner / size, -1.0), 1.0) if size > 0 else 0.0

    @property
    def z(self) -> float:
        """The averaged inner product in standard errors of one measurement; nan where the average
        of their unbiased squares is not positive."""
        if self.inner_variance <= 0:
            return math.nan
        return self.inner / math.sqrt(self.inner_variance)

    @classmethod
    def of(cls, values: Sequence[float]) -> GateState:
        """From plain JSON types.

        Raises:
            ValueError: a wrong number of values, or nan.
        """
        return cls(*numbers("gate", values, len(cls._fields)))


@dataclass(frozen=True)
class Gate:
    """Lowers mu where the gradient of the demonstrations opposes that of the rewards.

    mu = proposal * trust with trust = clip(at_zero + slope * measure, 0, 1). What is not known
    (nan) changes nothing, and before the first measurement the trust is that of a measure of 0.
    """

    form: str = "mean_cosine"
    """The measure: "cosine", of both gradients, from averages of their products without noise;
    "mean_cosine", the average of the cosines of the measured gradients; or "z", the inner product
    in standard errors."""
    at_zero: float | None = None
    """Trust where the measure is 0, in [0, 1]; null: the form's own."""
    slope: float | None = None
    """Rise of the trust per unit of the measure, >= 0; null: the form's own."""
    decay: float = 0.85
    """EMA decay of what is measured, in [0, 1), per refresh, started at the first value."""
    hysteresis: float = 0.0
    """Smaller changes of the trust are ignored, those to 0 and 1 excepted; in [0, 1]."""

    def __post_init__(self) -> None:
        require(self.form in FORMS, "form", self.form, f"one of {', '.join(FORMS)}")
        at_zero, slope = self.line
        require(is_real(at_zero) and 0 <= at_zero <= 1, "at_zero", at_zero, "a number in [0, 1]")
        require(is_real(slope) and slope >= 0, "slope", slope, "a finite number >= 0")
        decay_ok = is_real(self.decay) and 0 <= self.decay < 1
        require(decay_ok, "decay", self.decay, "a number in [0, 1)")
        inside = is_real(self.hysteresis) and 0 <= self.hysteresis <= 1
        require(inside, "hysteresis", self.hysteresis, "a number in [0, 1]")

    @property
    def line(self) -> tuple[float, float]:
        """`at_zero` and `slope` in use."""
        at_zero, slope = FORMS[self.form]
        return (
            at_zero if self.at_zero is None else self.at_zero,
            slope if self.slope is None else self.slope,
        )

    def trust(self, state: GateState | None, doubted: bool = False) -> float:
        """The factor of the proposal, in [0, 1]; doubted: see `next`."""
        if state is None:
            return 0.0 if doubted else self.line[0]
        return state.trust

    def restarted(self, state: GateState | None, doubted: bool) -> GateState | None:
        """The state where the demonstrations have changed: that of a measure of 0."""
        if state is None:
            return None
        return state._replace(inner=0.0, trust=self.trust(None, doubted))

    def next(
        self, state: GateState | None, seen: Alignment, doubted: bool = False
    ) -> GateState | None:
        """The state after a refresh that measured `seen`; unchanged if any of it is unknown.

        doubted: demonstrations are presumed wrong, so that the trust at a measure of 0 is 0.
        """
        seen = seen.normalised() if self.form == "mean_cosine" else seen
        values = list(map(float, seen[:4]))
        if not all(map(math.isfinite, values)):
            return state
        if state is not None:
            pairs = zip(state, values, strict=False)  # the trust is no average
            values = [self.decay * old + (1 - self.decay) * new for old, new in pairs]
        inner, error, sft, rl = values
        after = GateState(inner, error, sft, rl, self.trust(state, doubted))
        at_zero, slope = self.line
        at_zero = 0.0 if doubted else at_zero
        measure = after.z if self.form == "z" else after.cosine
        if math.isnan(measure):
            return after
        trust = min(max(at_zero + slope * measure, 0.0), 1.0)
        if trust in (0.0, 1.0) or abs(trust - after.trust) > self.hysteresis:
            return after._replace(trust=trust)
        return after
