"""Artificial streams of demonstration losses, and what the alarm decides on them.

A step counts as wrong if the alarm is on for correct demonstrations, or off for wrong ones. Unless
stated otherwise, losses have mean 1 and normal noise of 5%, and a stream has 1,000 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from gac.control.alarm import Alarm, AlarmState

STEPS = 1000
Losses = NDArray[np.float64]  # [steps], or [steps, batch] for the loss of each demonstration


class Stream(NamedTuple):
    """A simulated stream of losses, and the steps at which an alarm is correct."""

    make: Callable[[Generator], Losses]
    wrong: slice = slice(0, 0)
    """Steps at which the demonstrations are wrong."""
    limit: float = 0.01
    """Largest accepted fraction of wrong decisions."""


def _noisy(rng: Generator, factors: Losses | float = 1.0, noise: float = 0.05) -> Losses:
    return (1 + noise * rng.standard_normal(STEPS)) * factors


def _with(losses: Losses, steps: int | slice | list[int], factor: float) -> Losses:
    losses[steps] *= factor
    return losses


def _lognormal(rng: Generator, batch: int, sigma: float = 0.6) -> Losses:
    return np.exp(sigma * rng.standard_normal((STEPS, batch)))


def _autocorrelated(rng: Generator, share: float = 0.5) -> Losses:
    noise = rng.standard_normal(STEPS)
    for step in range(1, STEPS):
        noise[step] += share * noise[step - 1]
    return 1 + 0.05 * noise


T = np.arange(STEPS, dtype=np.float64)
SECOND = T // 60 % 2  # 1 while a second source of demonstrations is read
LATE = slice(500, None)
BURST = slice(50, 70)
NONE = slice(0, 0)
STREAMS = {
    "one outlier batch (x 2)": Stream(lambda g: _with(_noisy(g), 50, 2)),
    "three outlier batches": Stream(lambda g: _with(_noisy(g), [50, 300, 600], 2)),
    "three outlier batches in a row": Stream(lambda g: _with(_noisy(g), slice(50, 53), 2)),
    "20 wrong batches (x 2), then correct ones": Stream(
        lambda g: _with(_noisy(g), BURST, 2), BURST
    ),
    "lognormal (0.6), mean of 8": Stream(lambda g: _lognormal(g, 8).mean(1)),
    "lognormal (0.6), batches of 8": Stream(lambda g: _lognormal(g, 8)),
    "Student t, 3 degrees of freedom": Stream(lambda g: 1 + 0.05 * g.standard_t(3, STEPS)),
    "two sources (x 1.5), alternating every 60 steps": Stream(
        lambda g: _noisy(g, 1 + 0.5 * SECOND), NONE, 0.1
    ),
    "two sources (x 2), the worse one first": Stream(lambda g: _noisy(g, 2 - SECOND), NONE, 0.1),
    "slow rise to twice the level": Stream(lambda g: _noisy(g, 1 + T / STEPS)),
    "slow fall to half the level": Stream(lambda g: _noisy(g, 1 - T / STEPS / 2)),
    "lasting 30% jump": Stream(lambda g: _with(_noisy(g), LATE, 1.3), LATE),
    # below: chosen after the design was fixed
    "Laplace": Stream(lambda g: 1 + 0.05 * g.laplace(size=STEPS)),
    "Student t, 2 degrees of freedom": Stream(lambda g: 1 + 0.05 * g.standard_t(2, STEPS)),
    "gamma (shape 2)": Stream(lambda g: g.gamma(2.0, 0.5, STEPS)),
    "lognormal (0.6), batches of 1": Stream(lambda g: _lognormal(g, 1)),
    "lognormal (0.6), batches of 2": Stream(lambda g: _lognormal(g, 2)),
    "lognormal (1.0), batches of 8": Stream(lambda g: _lognormal(g, 8, 1.0)),
    "lognormal (0.6), batches of 64": Stream(lambda g: _lognormal(g, 64)),
    "lognormal (0.6), batches of 64, 50% jump": Stream(
        lambda g: _with(_lognormal(g, 64), LATE, 1.5), LATE
    ),
    "autocorrelated noise (0.5)": Stream(_autocorrelated),
    "2% outlier batches (x 3)": Stream(
        lambda g: _noisy(g, np.where(g.random(STEPS) < 0.02, 3.0, 1.0))
    ),
    "level 1e-6, 30% jump": Stream(lambda g: 1e-6 * _with(_noisy(g), LATE, 1.3), LATE),
    "level -10, noise 0.5, jump of 3": Stream(lambda g: 3 * (T >= 500) - 10 * _noisy(g), LATE),
    "level 0, noise 1": Stream(lambda g: g.standard_normal(STEPS)),
    "10% of the losses are nan": Stream(
        lambda g: _noisy(g, np.where(g.random(STEPS) < 0.1, np.nan, 1.0))
    ),
    "first epochs: 3 exp(-t / 20) + 0.4": Stream(lambda g: 3 * np.exp(-T / 20) + 0.4 * _noisy(g)),
    "the same, jump of 1 at step 48": Stream(
        lambda g: 3 * np.exp(-T / 20) + 0.4 * _noisy(g) + (T >= 48), slice(48, None)
    ),
    "fall to 0.3, then a 30% jump": Stream(
        lambda g: _noisy(g, np.select([T < 250, T < 500], [1.0, 0.3], 0.39)), LATE
    ),
    "half of each batch of 32 wrong (x 3)": Stream(
        lambda g: (
            _lognormal(g, 32, 0.3)
            * np.where((g.random((STEPS, 32)) < 0.5) & (T[:, None] >= 500), 3, 1)
        ),
        LATE,
    ),
}


class Result(NamedTuple):
    """Decisions of one run."""

    wrong: float
    """Fraction of steps decided wrongly."""
    false_alarms: int
    """Number of times that the alarm was raised by correct demonstrations."""
    delay: int | None
    """Steps from the change to the alarm; None without a change."""


def decisions(alarm: Alarm, losses: Losses) -> NDArray[np.bool_]:
    """Whether the alarm is on after each step."""
    state: AlarmState | None = None
    on = []
    for row in losses.tolist():
        loss, batch = (None, row) if isinstance(row, list) else (row, None)
        state, _ = alarm.update(state, loss, batch)
        on.append(state is not None and state.suspect)
    return np.array(on)


def run(stream: Stream, seed: int, alarm: Alarm | None = None) -> Result:
    """Test the alarm on one draw of the stream."""
    on = decisions(alarm or Alarm(), stream.make(np.random.default_rng(seed)))
    truth = np.zeros(STEPS, dtype=bool)
    truth[stream.wrong] = True
    raised = on & ~np.append(False, on[:-1])
    delay = None
    if truth.any():
        start = int(np.argmax(truth))
        delay = int(np.argmax(np.append(on[start:], True)))
    return Result(float(np.mean(on != truth)), int((raised & ~truth).sum()), delay)
