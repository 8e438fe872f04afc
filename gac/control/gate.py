"""The gate: scales the proposed mu down when rewards contradict the demonstrations.

If rewards confirm the demonstrations, the inner product of the two gradients is positive. It turns
negative if the demonstrations are wrong, or worse than the policy; mu should then fall, however
noisy the gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from gac.errors import numbers
from gac.fields import Checked, Decay, NonNegative, Share, one_of

from .signals import Alignment

FORMS = {"cosine": (0.5, 2.5), "mean_cosine": (0.6, 3.0), "z": (1.0, 0.5)}
"""Form -> (trust at a measure of 0, slope of the trust per unit of the measure)."""


class GateState(NamedTuple):
    """EMAs of the `Alignment` fields of the same names, and the current trust."""

    inner: float
    inner_variance: float
    sft_square: float
    rl_square: float
    trust: float

    @property
    def cosine(self) -> float:
        """Cosine of the two gradients, in [-1, 1].

        It is 0 if the noise-corrected square of either is not positive.
        """
        if self.sft_square <= 0 or self.rl_square <= 0:
            return 0.0
        size = math.sqrt(self.sft_square) * math.sqrt(self.rl_square)
        return min(max(self.inner / size, -1.0), 1.0)

    @property
    def z(self) -> float:
        """The averaged inner product divided by the standard error of one measurement.

        It is nan if the averaged squared error is not positive.
        """
        if self.inner_variance <= 0:
            return math.nan
        return self.inner / math.sqrt(self.inner_variance)

    @classmethod
    def of(cls, values: Sequence[float]) -> GateState:
        """Build a state from plain JSON types.

        Raises:
            ValueError: the number of values is wrong, or one is not finite.
        """
        return cls(*numbers("gate", values, len(cls._fields)))


@dataclass(frozen=True)
class Gate(Checked):
    """Lowers mu when the demonstration gradient opposes the reward gradient.

    mu = proposal * trust with trust = clip(at_zero + slope * measure, 0, 1). Unknown values (nan)
    change nothing. Before the first measurement, the measure counts as 0.
    """

    form: Annotated[str, one_of(*FORMS)] = "mean_cosine"
    """The measure: "cosine", the cosine of the two gradients, from averaged noise-corrected
    products; "mean_cosine", the average cosine of the measured gradients; or "z", the inner product
    in standard errors.
    """
    at_zero: Share | None = None
    """Trust at a measure of 0, in [0, 1]; null: the default of the form."""
    slope: NonNegative | None = None
    """Slope of the trust per unit of the measure, >= 0; null: the default of the form."""
    decay: Decay = 0.85
    """EMA decay of the measurements per refresh, in [0, 1); the EMA starts at the first value."""
    hysteresis: Share = 0.0
    """Changes of the trust smaller than this are ignored, except changes to 0 or 1; in [0, 1]."""

    @property
    def coefficients(self) -> tuple[float, float]:
        """`at_zero` and `slope`, with None replaced by the default of the gate's `form`."""
        at_zero, slope = FORMS[self.form]
        return (
            at_zero if self.at_zero is None else self.at_zero,
            slope if self.slope is None else self.slope,
        )

    def trust(self, state: GateState | None, demos_suspect: bool = False) -> float:
        """Factor in [0, 1] that multiplies the proposed mu; for `demos_suspect` see `update`."""
        if state is None:
            return 0.0 if demos_suspect else self.coefficients[0]
        return state.trust

    def reset(self, state: GateState | None, demos_suspect: bool) -> GateState | None:
        """Return the state after the demonstrations have changed: `inner` is reset to 0."""
        if state is None:
            return None
        return state._replace(inner=0.0, trust=self.trust(None, demos_suspect))

    def update(
        self, state: GateState | None, measured: Alignment, demos_suspect: bool = False
    ) -> GateState | None:
        """Return the state updated with the alignment measured at a refresh.

        The state does not change if any value is nan. With `demos_suspect`, the demonstrations are
        assumed to be wrong, and the trust at a measure of 0 is 0.
        """
        measured = measured.normalized() if self.form == "mean_cosine" else measured
        values = list(map(float, measured[:4]))
        if not all(map(math.isfinite, values)):
            return state
        if state is not None:
            values = [
                self.decay * old + (1 - self.decay) * new
                for old, new in zip(state, values, strict=False)  # the trust is not averaged
            ]
        inner, error, sft, rl = values
        after = GateState(
            inner=inner,
            inner_variance=error,
            sft_square=sft,
            rl_square=rl,
            trust=self.trust(state, demos_suspect),
        )
        at_zero, slope = self.coefficients
        at_zero = 0.0 if demos_suspect else at_zero
        measure = after.z if self.form == "z" else after.cosine
        if math.isnan(measure):
            return after
        trust = min(max(at_zero + slope * measure, 0.0), 1.0)
        if trust in (0.0, 1.0) or abs(trust - after.trust) >= self.hysteresis:
            return after._replace(trust=trust)
        return after
