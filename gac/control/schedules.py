"""Mixing weights that depend only on the step: callables step -> mu in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from gac.fields import Checked, Choice, Natural, Share, one_of

Shape = Annotated[str, one_of("linear", "cosine")]


def ramp(fraction: float, start: float, end: float, shape: str = "cosine") -> float:
    """Interpolate from `start` at fraction 0 to `end` at fraction 1; constant outside [0, 1]."""
    fraction = min(max(fraction, 0.0), 1.0)
    if fraction == 1.0:
        return end
    if shape == "cosine":
        return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * fraction))
    return start + (end - start) * fraction


@dataclass(frozen=True)
class Prior(Checked):
    """The controller's prior: hold, cosine decay, hold.

    The paper's text gives no numbers; the defaults follow its figure (about 0.85 for 200 steps,
    about 0.15 after 800). A trainer replaces None with a share of its run (`for_run`), so that the
    prior has the figure's shape in runs of any length.
    """

    high: Share = 0.85
    """Value of the first `hold` steps."""
    low: Share = 0.15
    """Value from step `hold + decay` on."""
    hold: Natural | None = 200
    """Number of steps at `high`; None: a quarter of the run, or 200 if its length is unknown."""
    decay: Natural | None = 600
    """Length of the cosine decay from `high` to `low`, in steps; None: three quarters of the run,
    or 600 if its length is unknown.
    """

    @classmethod
    def constant(cls, value: float) -> Prior:
        """The same prior at every step."""
        return cls(high=value, low=value, hold=0, decay=0)

    def for_run(self, steps: int) -> Prior:
        """This prior with each None replaced by its share of a run of `steps` steps."""
        quarter = steps // 4
        hold = quarter if self.hold is None else self.hold
        decay = steps - quarter if self.decay is None else self.decay
        return replace(self, hold=hold, decay=decay)

    def __call__(self, step: int) -> float:
        hold = 200 if self.hold is None else self.hold
        decay = 600 if self.decay is None else self.decay
        if step < hold:
            return self.high
        return ramp((step - hold) / decay if decay else 1.0, self.high, self.low)


PRIORS: dict[str, type] = {"cosine": Prior}
"""Name -> prior. A mapping without a name changes fields of the method's default prior."""
PriorChoice = Annotated[Callable[[int], float], Choice(lambda: PRIORS)]


@dataclass(frozen=True)
class MixSchedule(Checked):
    """Warm-up from `start` to `peak`, hold, decay to `valley`, hold."""

    peak: Share
    """Value after the warm-up."""
    valley: Share
    """Value after the decay."""
    warmup: Natural = 0
    """Number of steps from `start` to `peak`; 0: the schedule starts at `peak`."""
    hold: Natural = 0
    """Number of steps at `peak`."""
    decay: Natural = 0
    """Number of steps from `peak` to `valley`."""
    start: Share = 0.0
    """Value at step 0 if there is a warm-up."""
    warmup_shape: Shape = "linear"
    """"linear" or "cosine"."""
    decay_shape: Shape = "cosine"
    """"linear" or "cosine"."""

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return ramp(step / self.warmup, self.start, self.peak, self.warmup_shape)
        after = step - self.warmup - self.hold
        if after < 0:
            return self.peak
        fraction = after / self.decay if self.decay else 1.0
        return ramp(fraction, self.peak, self.valley, self.decay_shape)

    @classmethod
    def constant(cls, value: float) -> MixSchedule:
        """The same weight at every step; CHORD-phi uses 0.1 (arXiv 2508.11408)."""
        return cls(peak=value, valley=value)

    @classmethod
    def chord_mu(cls) -> MixSchedule:
        """CHORD-mu: 0.9 to 0.05 over 200 steps (arXiv 2508.11408, section 4.3)."""
        return cls(peak=0.9, valley=0.05, decay=200)

    @classmethod
    def wcf(cls) -> MixSchedule:
        """Our interpretation of WCF: that of Trinity-RFT's examples/mix_chord/mix_chord.yaml."""
        return cls(peak=0.5, valley=0.02, warmup=200, decay=400)


SCHEDULES: dict[str, type] = {"ramp": MixSchedule}
ScheduleChoice = Annotated[Callable[[int], float], Choice(lambda: SCHEDULES)]
