"""Detects a change in the demonstrations from a lasting rise in their loss.

When demonstrations turn bad, the policy loses what it learned from the good ones within about ten
steps, before averages of noisy gradients show the change. The loss shows it immediately. The test
is a one-sided CUSUM (Page, Continuous inspection schemes, Biometrika 1954) of winsorized forecast
errors, so that a single outlier cannot raise the alarm; docs/controller.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

from gac.errors import finite, is_count, require
from gac.fields import Checked, Decay, Natural, NonNegative, Number, Positive, Valid, number

MAX_SOURCES = 4  # number of other sources whose level is remembered
SCALE = 1.4  # makes the typical error a standard deviation for normal noise
CLEAR = 1.5  # CUSUM above which the alarm ends; a batch adds at most 1, so at least two are needed


class AlarmState(NamedTuple):
    """The reference level, and how far the losses have moved away from it."""

    level: float
    """Reference: EMA of the loss of trusted demonstrations; frozen while they are suspect."""
    scale: float
    """Typical size of a forecast error."""
    num_losses: int
    """Number of losses since the start, or since the alarm was last raised or cleared."""
    recent: float
    """EMA of about the last three normal losses; while the loss falls, `level` lags behind it."""
    cusum: float = 0.0
    """Evidence for a rise; while the alarm is on, for a return to the reference."""
    shifted: float = 0.0
    """Mean of the extreme losses since the CUSUM left 0; while the alarm is on, the level of the
    suspect demonstrations.
    """
    extremes: int = 0
    """Number of losses in the mean `shifted`."""
    suspect: bool = False
    """Whether the alarm is on: the demonstrations are assumed to be wrong."""
    sources: tuple[float, ...] = ()
    """Relative rise in the loss in each long alarm, which may be due to another good source."""

    def to_plain(self) -> dict[str, Any]:
        """The state in plain JSON types."""
        return {**self._asdict(), "sources": list(self.sources)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> AlarmState:
        """Restore a state from `to_plain`.

        Raises:
            ValueError: entries are missing or unknown, or a value is not finite.
        """
        wrong = sorted(map(str, set(plain) ^ set(cls._fields)))
        use = "a dict from to_plain(); the keys listed here are missing or unknown"
        require(not wrong, "alarm", wrong, use)
        values: dict[str, Any] = {
            name: finite("alarm", plain[name]) for name in cls._fields if name != "sources"
        }
        for name, kind in (("num_losses", int), ("extremes", int), ("suspect", bool)):
            values[name] = kind(values[name])
        return cls(**values, sources=tuple(finite("alarm", x) for x in plain["sources"]))


Plain = Mapping[str, Any] | None  # a state in plain JSON types; None: no state


def is_suspect(plain: Plain) -> bool:
    """Whether the alarm is on, given its serialized state."""
    return plain is not None and bool(plain["suspect"])


def alarm_message(before: Plain, after: Plain) -> str | None:
    """Log message if the alarm was raised or cleared, else None."""
    if after is None or is_suspect(before) == is_suspect(after):
        return None
    if not is_suspect(after):
        return f"the demonstration loss fell to {after['level']:.3g}: demonstrations are used again"
    return (
        f"the demonstration loss jumped to {after['shifted']:.3g}: the demonstrations are assumed "
        "to be wrong and are ignored; if they are correct, use a method without an alarm, such as "
        "constant"
    )


@dataclass(frozen=True)
class Alarm(Checked):
    """Raises an alarm when the demonstration loss rises lastingly; clears it when the loss returns.

    Losses that are None or not finite are ignored.
    """

    threshold: Positive = 4.9
    """The alarm is raised when the CUSUM of the forecast errors exceeds this, > 0. With the
    default, two extreme batches in a row raise it, and a single one does not.
    """
    slack: NonNegative = 1.5
    """Forecast error, in typical errors, that leaves the CUSUM unchanged, >= 0; smaller errors
    lower it.
    """
    clip: Number = 4.0
    """Forecast errors are winsorized at this many typical errors, > slack. A batch beyond twice the
    slack does not change the reference.
    """
    decay: Decay = 0.9
    """Per-step EMA decay of the level and the typical error, in [0, 1)."""
    warmup: Annotated[int, Valid("an integer >= 2", partial(is_count, minimum=2))] = 10
    """Number of initial losses that only update the averages, >= 2."""
    min_scale: Positive = 0.05
    """Smallest typical error, relative to the level, > 0. Without it, any drift would count as a
    rise with large batches, whose noise is low.
    """
    trim: Annotated[float, number("a number in [0, 0.5)", lambda x: 0 <= x < 0.5)] = 0.2
    """Fraction of the demonstrations of a batch that is winsorized at each end before their losses
    are averaged, in [0, 0.5).
    """
    source_steps: Natural = 30
    """An alarm that lasts at least this many steps and ends by itself is assumed to be due to a
    second source of good demonstrations. Once the losses have been normal for as many steps, a rise
    to the level of that source raises no alarm. 0: every rise raises an alarm.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.clip > self.slack, "clip", self.clip, f"a number > slack={self.slack!r}")

    def update(
        self,
        state: AlarmState | None,
        loss: float | None,
        losses: Sequence[float] | None = None,
    ) -> tuple[AlarmState | None, bool]:
        """The state after a step, and whether the alarm was raised or cleared.

        Args:
            state: the state before the step; None before the first.
            loss: mean loss of the step's demonstrations.
            losses: loss of each demonstration; if one of them is finite, `loss` is not read.
        """
        finite_losses = [x for x in losses or () if math.isfinite(x)]
        if finite_losses:
            loss = winsorized_mean(finite_losses, self.trim)
        if loss is None or not math.isfinite(loss):
            return state, False
        loss = float(loss)
        if state is None:
            return AlarmState(loss, 0.0, 1, loss), False
        return (self._while_on if state.suspect else self._while_off)(state, loss)

    def update_plain(
        self, plain: Plain, loss: float | None, losses: Sequence[float] | None
    ) -> dict[str, Any] | None:
        """`update` of a state from `AlarmState.to_plain`, in the same plain JSON types."""
        state = None
        if plain is not None:
            state = AlarmState(**{**plain, "sources": tuple(plain["sources"])})
        after, _ = self.update(state, loss, losses)
        return None if after is None else after.to_plain()

    def _typical_error(self, state: AlarmState) -> float:
        # a level of 0 has no relative size
        return max(state.scale, self.min_scale * abs(state.level), 1e-12)

    def _while_off(self, state: AlarmState, loss: float) -> tuple[AlarmState, bool]:
        """Look for a rise, and let the reference follow the loss."""
        error, typical = loss - state.level, self._typical_error(state)
        if state.num_losses < self.warmup:
            return self._follow(state, loss, error), False
        size = error / typical
        extreme = size > 2 * self.slack
        cusum = max(0.0, state.cusum + min(size, self.clip) - self.slack)
        shifted, extremes = state.shifted, state.extremes
        if cusum == 0 and extremes > 0:  # they were outliers, so they count as noise
            growth = 1 + _scale_rate(self.decay, state.num_losses) * (SCALE * self.clip - 1)
            state, extremes = state._replace(scale=typical * growth**extremes), 0
        if extreme:
            extremes += 1
            shifted += (loss - shifted) / extremes
        cusum = min(cusum, self.threshold + self.clip)  # else small drifts would add up
        state = state._replace(cusum=cusum, shifted=shifted, extremes=extremes)
        if cusum > self.threshold and extremes > 1:
            start = state._replace(cusum=0.0, extremes=0)
            known = self._known_level(state)
            if known is not None:
                level = max(known, shifted)  # the extreme losses may have been low by chance
                num_losses = state.num_losses + 1
                return start._replace(level=level, recent=level, num_losses=num_losses), False
            level = min(state.level, state.recent)
            return start._replace(level=level, num_losses=1, suspect=True), True
        if extreme:
            return state._replace(num_losses=state.num_losses + 1), False
        return self._follow(state, loss, max(error, -self.clip * typical)), False

    def _follow(self, state: AlarmState, loss: float, error: float) -> AlarmState:
        """Update the level and the typical error with one more forecast error."""
        level = state.level + max(1 - self.decay, 1 / (state.num_losses + 1)) * error
        # while the loss falls, the level lags behind it, and this error is not noise
        size = error if error > 0 else min(-error, abs(loss - state.recent))
        # during a rise, errors must not hide it by counting as noise
        rate = 0.0 if error > 0 and state.cusum > 1 else _scale_rate(self.decay, state.num_losses)
        scale = state.scale + rate * (SCALE * size - state.scale)
        recent = (state.recent + loss) / 2
        return AlarmState(level, scale, state.num_losses + 1, recent, *state[4:])

    def _known_level(self, state: AlarmState) -> float | None:
        """The level of a remembered source, if the losses have risen to that level.

        None if no source matches, or if the losses were normal for fewer than `source_steps` steps.
        """
        if state.num_losses - self.warmup < self.source_steps:
            return None
        noise = self.clip * self._typical_error(state)
        for source in state.sources:
            rise = source * abs(state.level)
            if abs(state.level + rise - state.shifted) <= max(noise, rise / 2):
                return state.level + rise
        return None

    def _while_on(self, state: AlarmState, loss: float) -> tuple[AlarmState, bool]:
        """Check whether the loss is back at the reference, which is fixed during an alarm."""
        half = (state.shifted - state.level) / 2
        step = (state.level + half - loss) / half if half > 0 else 1.0
        cusum = max(0.0, state.cusum + min(max(step, -1.0), 1.0))
        if cusum > CLEAR:
            back = loss <= state.level + self.clip * self._typical_error(state)
            if not back:  # the policy has learned the new demonstrations: a new reference level
                return AlarmState(loss, 0.0, 1, loss), True
            start = AlarmState(state.level, state.scale, self.warmup, loss, sources=state.sources)
            return start, True
        sources = state.sources
        if state.num_losses == self.source_steps:
            rise = (state.shifted - state.level) / max(abs(state.level), 1e-12)
            sources = (*sources, rise)[-MAX_SOURCES:]
        after = state._replace(cusum=cusum, num_losses=state.num_losses + 1, sources=sources)
        return after, False


def _scale_rate(decay: float, count: int) -> float:
    """EMA weight of the newest forecast error in the typical error.

    It is half the weight in the level, so the typical error averages over twice as many steps.
    """
    return max((1 - decay) / 2, 1 / count)


def winsorized_mean(losses: Sequence[float], trim: float) -> float:
    """Mean with the lowest and highest fraction `trim` of values clipped to the range of the rest.

    Source:
        Tukey and McLaughlin, Sankhya 1963. A median does not react when up to half of a batch turns
        bad; a mean reacts to a single demonstration.
    """
    ordered = sorted(losses)
    cut = int(trim * len(ordered))
    low, high = ordered[cut], ordered[-1 - cut]
    return math.fsum(min(max(x, low), high) for x in ordered) / len(ordered)
