"""A jump of the demonstrations' loss: they are others now, and nothing says yet whether they help.

Where demonstrations go bad, what the policy learnt from the good ones is lost within some ten
steps, sooner than averages of noisy gradients can tell. The loss tells it at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gac.checks import is_count, is_real, numbers, require

LEAST = 0.1  # of the level: large batches have so little noise that any drift would be a jump


class AlarmState(NamedTuple):
    """What the losses so far forecast, and which way they last jumped."""

    level: float
    """The average loss, the forecast of the next one."""
    square: float
    """The average squared error of such forecasts."""
    seen: int
    """Losses since the last jump."""
    raised: bool
    """Whether the last jump was a rise."""

    @classmethod
    def of(cls, values: Sequence[float]) -> AlarmState:
        """From plain JSON types.

        Raises:
            ValueError: a wrong number of values, or nan.
        """
        level, square, seen, raised = numbers("alarm", values, len(cls._fields))
        return cls(level, square, int(seen), bool(raised))


def notice(before: Sequence[float] | None, after: Sequence[float] | None) -> str | None:
    """A line for the log where the presumption has changed; both are states in plain JSON types."""
    was, now = (None if x is None else AlarmState.of(x) for x in (before, after))
    if now is None or now.raised == (was is not None and was.raised):
        return None
    if not now.raised:
        return f"the demonstrations' loss fell to {now.level:.3g}: they are learnt from again"
    return (
        f"the demonstrations' loss jumped to {now.level:.3g}: they are presumed wrong and left "
        "out; if they are right, use a method without an alarm, such as constant"
    )


@dataclass(frozen=True)
class Alarm:
    """Demonstrations whose loss rises suddenly are presumed wrong, until it falls as suddenly.

    A loss that is not finite, or None, changes nothing.
    """

    threshold: float = 6.0
    """A jump is an error of the forecast by more than so many times its usual size (root mean
    square), and by a tenth of the level; > 0."""
    decay: float = 0.9
    """EMA decay of level and squared error, in [0, 1), per step."""
    warmup: int = 10
    """Losses after the start or a jump that only tell what is usual, >= 2."""

    def __post_init__(self) -> None:
        positive = is_real(self.threshold) and self.threshold > 0
        require(positive, "threshold", self.threshold, "a number > 0")
        decay_ok = is_real(self.decay) and 0 <= self.decay < 1
        require(decay_ok, "decay", self.decay, "a number in [0, 1)")
        require(is_count(self.warmup, 2), "warmup", self.warmup, "an integer >= 2")

    def next(self, state: AlarmState | None, loss: float | None) -> tuple[AlarmState | None, bool]:
        """The state after a step whose demonstrations had this mean loss, and whether it jumped."""
        if loss is None or not math.isfinite(loss):
            return state, False
        if state is None:
            return AlarmState(float(loss), 0.0, 1, False), False
        level, square, seen, raised = state
        error = loss - level
        usual = max(self.threshold * math.sqrt(square), LEAST * abs(level))
        if seen >= self.warmup and abs(error) > usual:
            return AlarmState(float(loss), 0.0, 1, error > 0), True
        keep = self.decay if seen > 1 else 0.0  # the first error starts the average
        square = keep * square + (1 - keep) * error * error
        level = self.decay * level + (1 - self.decay) * loss
        return AlarmState(level, square, seen + 1, raised), False
