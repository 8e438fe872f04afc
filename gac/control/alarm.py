"""Detects a sudden jump of the demonstration loss, a sign that the demonstrations have changed.

When demonstrations turn bad, the policy loses what it learned from the good ones within about ten
steps, before averages of noisy gradients show it. The loss shows it immediately.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gac.control.checks import is_count, is_real, numbers, require

LEAST = 0.1  # smallest jump relative to the level; with large batches the noise is so low that any drift would count


class AlarmState(NamedTuple):
    """Forecast of the next loss, and the direction of the last jump."""

    level: float
    """EMA of the loss, used as the forecast of the next one."""
    square: float
    """EMA of the squared forecast error."""
    seen: int
    """Number of losses since the last jump."""
    raised: bool
    """Whether the last jump was upward."""

    @classmethod
    def of(cls, values: Sequence[float]) -> AlarmState:
        """Build from plain JSON types.

        Raises:
            ValueError: the number of values is wrong, or one is not finite.
        """
        level, square, seen, raised = numbers("alarm", values, len(cls._fields))
        return cls(level, square, int(seen), bool(raised))


def notice(before: Sequence[float] | None, after: Sequence[float] | None) -> str | None:
    """Log message if the alarm was raised or cleared, else None. Both states are in plain JSON
    types.
    """
    was, now = (None if x is None else AlarmState.of(x) for x in (before, after))
    if now is None or now.raised == (was is not None and was.raised):
        return None
    if not now.raised:
        return f"the demonstration loss fell to {now.level:.3g}: demonstrations are used again"
    return (
        f"the demonstrations' loss jumped to {now.level:.3g}: they are presumed wrong and left "
        "out; if they are right, use a method without an alarm, such as constant"
    )


@dataclass(frozen=True)
class Alarm:
    """Assumes demonstrations to be wrong after a sudden rise of their loss, until it falls as
    suddenly.

    Losses that are None or not finite are ignored.
    """

    threshold: float = 6.0
    """A jump is a forecast error of more than this many times its root mean square, and of more
    than a tenth of the level; > 0.
    """
    decay: float = 0.9
    """Per-step EMA decay of the level and the squared error, in [0, 1)."""
    warmup: int = 10
    """Number of losses after the start or a jump that only update the averages, >= 2."""

    def __post_init__(self) -> None:
        positive = is_real(self.threshold) and self.threshold > 0
        require(positive, "threshold", self.threshold, "a number > 0")
        decay_ok = is_real(self.decay) and 0 <= self.decay < 1
        require(decay_ok, "decay", self.decay, "a number in [0, 1)")
        require(is_count(self.warmup, 2), "warmup", self.warmup, "an integer >= 2")

    def next(self, state: AlarmState | None, loss: float | None) -> tuple[AlarmState | None, bool]:
        """Update with a step's mean demonstration loss. Returns the new state and whether the loss
        jumped.
        """
        if loss is None or not math.isfinite(loss):
            return state, False
        if state is None:
            return AlarmState(float(loss), 0.0, 1, False), False
        level, square, seen, raised = state
        error = loss - level
        usual = max(self.threshold * math.sqrt(square), LEAST * abs(level))
        if seen >= self.warmup and abs(error) > usual:
            return AlarmState(float(loss), 0.0, 1, error > 0), True
        keep = self.decay if seen > 1 else 0.0  # the first error initializes the average
        square = keep * square + (1 - keep) * error * error
        level = self.decay * level + (1 - self.decay) * loss
        return AlarmState(level, square, seen + 1, raised), False
