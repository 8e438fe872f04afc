"""Mixing weights that depend only on the step: callables step -> mu in [0, 1]."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Annotated

from gac.config import Choice
from gac.control.checks import is_count, is_real, require

SHAPES = ("linear", "cosine")


def ramp(fraction: float, start: float, end: float, shape: str = "cosine") -> float:
    """Interpolate from `start` at fraction 0 to `end` at fraction 1; constant outside [0, 1]."""
    fraction = min(max(fraction, 0.0), 1.0)
    if fraction == 1.0:
        return end
    if shape == "cosine":
        return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * fraction))
    return start + (end - start) * fraction


@dataclass(frozen=True)
class Prior:
    """The controller's prior: hold, cosine decay, hold.

    The paper's text gives no numbers; the defaults follow its figure (about 0.85 for 200 steps,
    about 0.15 after 800).
    """

    high: float = 0.85
    """Value of the first `hold` steps."""
    low: float = 0.15
    """Value from step `hold + decay` on."""
    hold: int = 200
    """Steps at `high`."""
    decay: int = 600
    """Steps of the cosine from `high` to `low`."""

    def __post_init__(self) -> None:
        _check(self, weights=("high", "low"), counts=("hold", "decay"))

    @classmethod
    def constant(cls, value: float) -> Prior:
        """The same prior at every step."""
        return cls(high=value, low=value, hold=0, decay=0)

    def __call__(self, step: int) -> float:
        if step < self.hold:
            return self.high
        return ramp((step - self.hold) / self.decay if self.decay else 1.0, self.high, self.low)


@dataclass(frozen=True)
class RandomPrior:
    """Random values, uniform in [low, high]: the paper's misspecified prior.

    Depends only on the seed and the step, so resumed runs and all ranks see the same values.
    """

    low: float = 0.1
    """Smallest value."""
    high: float = 0.9
    """Largest value."""
    interval: int = 1
    """Number of steps between draws."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        _check(self, weights=("low", "high"), counts=())
        require(self.low <= self.high, "low", self.low, f"a number <= high={self.high!r}")
        require(is_count(self.interval, 1), "interval", self.interval, "an integer >= 1")

    def __call__(self, step: int) -> float:
        draw = uniform("prior", self.seed, step // self.interval)
        return self.low + (self.high - self.low) * draw


PRIORS: dict[str, type] = {"cosine": Prior, "random": RandomPrior}
"""Name -> prior. A mapping without a name changes fields of the method's default prior."""
PriorChoice = Annotated[Prior | RandomPrior, Choice(lambda: PRIORS)]


@dataclass(frozen=True)
class MixSchedule:
    """Warm-up from `start` to `peak`, hold, decay to `valley`, hold."""

    peak: float
    """Value after the warm-up."""
    valley: float
    """Value after the decay."""
    warmup: int = 0
    """Steps from `start` to `peak`; 0: the schedule starts at `peak`."""
    hold: int = 0
    """Steps at `peak`."""
    decay: int = 0
    """Steps from `peak` to `valley`."""
    start: float = 0.0
    """Value at step 0 if there is a warm-up."""
    warmup_shape: str = "linear"
    """"linear" or "cosine"."""
    decay_shape: str = "cosine"
    """"linear" or "cosine"."""

    def __post_init__(self) -> None:
        _check(self, weights=("peak", "valley", "start"), counts=("warmup", "hold", "decay"))
        for name in ("warmup_shape", "decay_shape"):
            shape = getattr(self, name)
            require(shape in SHAPES, name, shape, f"one of {', '.join(SHAPES)}")

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
    def chord_yaml(cls) -> MixSchedule:
        """The schedule in Trinity-RFT's examples/mix_chord/mix_chord.yaml."""
        return cls(peak=0.5, valley=0.02, warmup=200, decay=400)

    @classmethod
    def hpcd(cls) -> MixSchedule:
        """HPCD, which the paper does not define; our interpretation: high peak, cosine decay."""
        return cls.chord_mu()

    @classmethod
    def wcf(cls) -> MixSchedule:
        """WCF, interpreted as warm-up, cosine and floor, because the paper does not define it."""
        return cls.chord_yaml()

    @classmethod
    def qcm(cls) -> MixSchedule:
        """QCM: constant 0.58, the only schedule that the paper defines."""
        return cls.constant(0.58)


def uniform(name: str, seed: int, index: int) -> float:
    """A pseudo-random number in [0, 1) that depends only on the arguments.

    It is the same on every machine and in every process.
    """
    return random.Random(f"{name}:{seed}:{index}").random()  # a string seed is hashed by SHA-512


def _check(schedule: object, weights: tuple[str, ...], counts: tuple[str, ...]) -> None:
    for name in weights:
        value = getattr(schedule, name)
        require(is_real(value) and 0 <= value <= 1, name, value, "a number in [0, 1]")
    for name in counts:
        value = getattr(schedule, name)
        require(is_count(value), name, value, "an integer >= 0")
