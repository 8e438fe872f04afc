"""Ablations of `gac`: degraded signals, misspecified priors, and options switched off.

`gac study CONFIG.yaml --methods LABEL@gac:key=value` runs such a variant; `ABLATIONS` has those of
the paper. The classes are used by name in a configuration, e.g. `method.prior:
research.ablations:RandomPrior`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from gac.control.signals import ProxySignals, Reading, Source, SourceNeeds
from gac.errors import is_count, is_real, require
from gac.types import Evidence, State
from gac_kernels import Signals


@dataclass(frozen=True)
class DegradedSignals:
    """Wraps another source and replaces one of its signals."""

    source: Source = field(default_factory=ProxySignals)
    """Source of the other signals."""

    @property
    def needs(self) -> SourceNeeds:
        """Require what the wrapped source requires."""
        return self.source.needs

    def init(self) -> State:
        """The initial state of the wrapped source."""
        return self.source.init()

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """The wrapped source's reading with one value replaced."""
        reading, state = self.source.read(evidence, state)
        return reading._replace(signals=self.degrade(reading.signals, evidence.step)), state

    def degrade(self, signals: Signals, step: int) -> Signals:
        """Return the signals of the refresh at `step` with one value replaced."""
        raise NotImplementedError


@dataclass(frozen=True)
class ConstantVariance(DegradedSignals):
    """Wraps a source and replaces sigma_r^2 by a constant: the paper's degradation (a)."""

    value: float = 1.0
    """sigma_r^2 >= 0."""

    def __post_init__(self) -> None:
        require(is_real(self.value) and self.value >= 0, "value", self.value, "a number >= 0")

    def degrade(self, signals: Signals, step: int) -> Signals:
        """Replace the variance by the constant."""
        return signals._replace(rl_variance=self.value)


@dataclass(frozen=True)
class ShuffledDisagreement(DegradedSignals):
    """Replaces the disagreement of a source with a random recent one: the paper's degradation (b).

    The values keep their distribution over the last `window` refreshes but lose their order.
    """

    window: int = 64
    """Number of refreshes to draw from, including the current one."""
    seed: int = 0
    """Random seed; a draw depends only on the seed and the step."""

    def __post_init__(self) -> None:
        require(is_count(self.window, 2), "window", self.window, "an integer >= 2")

    def init(self) -> State:
        """The wrapped source's state and an empty history."""
        return {"source": self.source.init(), "past": []}

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """The wrapped source's reading; a random recent refresh provides its disagreement."""
        reading, inner = self.source.read(evidence, state["source"])
        value = reading.signals.disagreement
        new = [value] if math.isfinite(value) else []
        history = [*state["past"], *new][-self.window :]
        if history:
            value = history[int(len(history) * uniform("shuffle", self.seed, evidence.step))]
        signals = reading.signals._replace(disagreement=value)
        return reading._replace(signals=signals), {"source": inner, "past": history}


@dataclass(frozen=True)
class RandomDisagreement(DegradedSignals):
    """Wraps a source; replaces the disagreement by uniform noise: the paper's degradation (c)."""

    low: float = 0.0
    """Smallest value."""
    high: float = 1.0
    """Largest value, as in the paper; the true proxy lies in [0, 4]."""
    seed: int = 0
    """Random seed; a draw depends only on the seed and the step."""

    def __post_init__(self) -> None:
        require(is_real(self.low) and self.low >= 0, "low", self.low, "a number >= 0")
        high_ok = is_real(self.high) and self.high >= self.low
        require(high_ok, "high", self.high, f"a number >= low={self.low!r}")

    def degrade(self, signals: Signals, step: int) -> Signals:
        """Replace the disagreement by a draw that depends only on the seed and the step."""
        draw = uniform("disagreement", self.seed, step)
        return signals._replace(disagreement=self.low + (self.high - self.low) * draw)


@dataclass(frozen=True)
class FixedOptimum:
    """Signals for which equation 3 gives the same mu* at every refresh: the paper's fixed mu."""

    mu: float = 0.58
    """mu*, in [0, 1]; the default is the paper's QCM."""
    needs = SourceNeeds()

    def __post_init__(self) -> None:
        require(is_real(self.mu) and 0 <= self.mu <= 1, "mu", self.mu, "a number in [0, 1]")

    def init(self) -> State:
        """Return an empty state: this source is stateless."""
        return {}

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """Variances whose optimum is mu, without disagreement."""
        return Reading(Signals(1 - self.mu, self.mu, 0.0)), state


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
        inside = is_real(self.low) and is_real(self.high) and self.low >= 0 and self.high <= 1
        require(inside, "low", self.low, "numbers in [0, 1]")
        require(self.low <= self.high, "low", self.low, f"a number <= high={self.high!r}")
        require(is_count(self.interval, 1), "interval", self.interval, "an integer >= 1")

    def __call__(self, step: int) -> float:
        draw = uniform("prior", self.seed, step // self.interval)
        return self.low + (self.high - self.low) * draw


def uniform(name: str, seed: int, index: int) -> float:
    """A pseudo-random number in [0, 1) that depends only on the arguments.

    It is the same on every machine and in every process.
    """
    return random.Random(f"{name}:{seed}:{index}").random()  # a string seed is hashed by SHA-512


_HERE = "research.ablations:"
_GRADIENTS = {"name": "gradients"}
_FIXED = 0.58
ABLATIONS: dict[str, dict[str, Any]] = {
    "fixed-mu-ema": {
        "weight": "one",
        "prior_blend": 1.0,
        "signals": f"{_HERE}FixedOptimum",
        **dict.fromkeys(
            ("alpha_init", "alpha_min", "alpha_max"), _FIXED
        ),  # before the first signals
    },
    "gac-no-phi": {"weight": "one"},
    "gac-no-ema": {"ema": "none"},
    "gac-no-prior": {"prior_blend": 1.0},
    "gac-no-cap": {"max_step": 1.0},
    "gac-no-trim": {"signals": {"name": "proxy", "trim": 0.0}},
    "gac-covariance": {"estimator": "correlated", "signals": _GRADIENTS | {"paired": True}},
    "gac-biased": {"estimator": "biased", "signals": _GRADIENTS | {"bias": True}},
    "gac-biased-paper": {"estimator": "biased_paper", "signals": _GRADIENTS | {"bias": True}},
    "gac-early-refresh": {"early_update_every": 2},
    "gac-constant-variance": {"signals": f"{_HERE}ConstantVariance"},
    "gac-shuffled-disagreement": {"signals": f"{_HERE}ShuffledDisagreement"},
    "gac-random-disagreement": {"signals": f"{_HERE}RandomDisagreement"},
    "gac-prior-low": {"prior": {"high": 0.1, "low": 0.1}},
    "gac-prior-high": {"prior": {"high": 0.9, "low": 0.9}},
    "gac-prior-random": {"prior": f"{_HERE}RandomPrior"},
    "oracle": {
        "ema": "none",
        "prior_blend": 1.0,
        "max_step": 1.0,
        "signal_decay": 0.0,
        "signals": _GRADIENTS,
    },
}
"""Label -> fields of `gac` that differ from its defaults: the paper's tables 3, 7, 8, 15 and 22,
equations 4 and 5, appendix E, and its oracle (mu* without averaging, prior or cap)."""
