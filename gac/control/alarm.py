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

# Smallest jump, relative to the level. With large batches the noise is so low that any drift would
# count as a jump.
MIN_JUMP = 0.1


class AlarmState(NamedTuple):
    """Forecast of the next loss, and the direction of the last jump."""

    level: float
    """EMA of the loss, used as the forecast of the next one."""
    square: float
    """EMA of the squared forecast error."""
    num_losses: int
    """Number of losses since the last jump."""
    raised: bool
    """Whether the last jump was upward."""

    @classmethod
    def of(cls, values: Sequence[float]) -> AlarmState:
        """Build from plain JSON types.

        Raises:
            ValueError: the number of values is wrong, or one is not finite.
        """
        level, square, num_losses, raised = numbers("alarm", values, len(cls._fields))
        return cls(level, square, int(num_losses), bool(raised))


def alarm_message(before: Sequence[float] | None, after: Sequence[float] | None) -> str | None:
    """Log message if the alarm was raised or cleared, else None; states are plain JSON types."""
    old, new = (None if state is None else AlarmState.of(state) for state in (before, after))
    if new is None or new.raised == (old is not None and old.raised):
        return None
    if not new.raised:
        return f"the demonstration loss fell to {new.level:.3g}: demonstrations are used again"
    return (
        f"the demonstration loss jumped to {new.level:.3g}: the demonstrations are assumed to be "
        "wrong and are ignored; if they are correct, use a method without an alarm, such as "
        "constant"
    )


@dataclass(frozen=True)
class Alarm:
    """Assumes that the demonstrations are wrong after their loss jumps up, until it jumps down.

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

    def update(
        self, state: AlarmState | None, loss: float | None
    ) -> tuple[AlarmState | None, bool]:
        """Return the state after a step's mean demonstration loss, and whether the loss jumped."""
        if loss is None or not math.isfinite(loss):
            return state, False
        if state is None:
            return AlarmState(float(loss), 0.0, 1, False), False
        level, square, num_losses, raised = state
        error = loss - level
        limit = max(self.threshold * math.sqrt(square), MIN_JUMP * abs(level))
        if num_losses >= self.warmup and abs(error) > limit:
            return AlarmState(float(loss), 0.0, 1, error > 0), True
        decay = self.decay if num_losses > 1 else 0.0  # the first error initializes the average
        square = decay * square + (1 - decay) * error * error
        level = self.decay * level + (1 - self.decay) * loss
        return AlarmState(level, square, num_losses + 1, raised), False
