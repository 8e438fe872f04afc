"""Schedules: values worked out by hand, and error messages."""

import math

import pytest

from gac.control.schedules import MixSchedule, Prior, ramp


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.85),
        (199, 0.85),
        (200, 0.85),
        (350, 0.15 + 0.7 * 0.5 * (1 + math.sqrt(0.5))),
        (500, 0.5),
        (800, 0.15),
        (10**6, 0.15),
    ],
)
def test_prior_holds_then_follows_half_a_cosine(step: int, expected: float) -> None:
    assert Prior()(step) == pytest.approx(expected, abs=1e-15)


def test_the_prior_of_a_run_takes_a_quarter_and_three_quarters_of_it() -> None:
    scaled = Prior(hold=None, decay=None)
    assert scaled.for_run(20) == Prior(hold=5, decay=15)
    assert scaled.for_run(800) == Prior()
    assert Prior(hold=3, decay=None).for_run(20) == Prior(hold=3, decay=15)
    assert Prior().for_run(20) == Prior()  # explicit numbers stay
    assert [scaled(t) for t in (0, 300, 900)] == [Prior()(t) for t in (0, 300, 900)]


def test_without_a_decay_the_value_is_constant_or_drops_at_once() -> None:
    assert {Prior.constant(0.1)(t) for t in range(1000)} == {0.1}
    # a run resumes only with the same fields
    assert Prior.constant(0.1) == Prior(high=0.1, low=0.1, hold=0, decay=0)
    prior = Prior(high=0.8, low=0.2, hold=5, decay=0)
    mix = MixSchedule(0.8, 0.2, warmup=2, hold=3)
    assert [schedule(t) for schedule in (prior, mix) for t in (4, 5)] == [0.8, 0.2] * 2


def test_a_ramp_ends_exactly() -> None:
    for shape in ("linear", "cosine"):
        assert [ramp(x, 0.9, 0.05, shape) for x in (-1.0, 0.0, 1.0, 2.0)] == [0.9, 0.9, 0.05, 0.05]
    assert ramp(0.25, 0.9, 0.1, "linear") == pytest.approx(0.7)
    assert ramp(0.25, 0.9, 0.1) == pytest.approx(0.5 + 0.4 * math.sqrt(0.5))


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        (MixSchedule.chord_mu(), 0, 0.9),  # no warm-up: starts at the peak
        (MixSchedule.chord_mu(), 100, 0.475),
        (MixSchedule.chord_mu(), 200, 0.05),
        (MixSchedule.wcf(), 0, 0.0),  # with a warm-up: starts at 0
        (MixSchedule.wcf(), 100, 0.25),
        (MixSchedule.wcf(), 200, 0.5),
        (MixSchedule.wcf(), 400, 0.26),
        (MixSchedule.wcf(), 600, 0.02),
        (MixSchedule.constant(0.58), 12345, 0.58),
        (MixSchedule(0.8, 0.2, warmup=4, hold=2, decay=4, start=0.4), 2, 0.6),
        (MixSchedule(0.8, 0.2, warmup=4, hold=2, decay=4, start=0.4), 5, 0.8),
        (MixSchedule(0.8, 0.2, warmup=4, hold=2, decay=4, start=0.4), 8, 0.5),
        (MixSchedule(0.8, 0.2, decay=4, decay_shape="linear"), 1, 0.65),
        (MixSchedule(0.8, 0.2, warmup=4, start=0.4), 1, 0.5),
        (
            MixSchedule(0.8, 0.2, warmup=4, warmup_shape="cosine", decay_shape="linear"),
            1,
            0.4 - 0.4 * math.sqrt(0.5),
        ),
        (MixSchedule(0.8, 0.2, warmup=2), 2, 0.2),  # no decay steps: drops to the valley at once
    ],
)
def test_mix_schedule_values(schedule: MixSchedule, step: int, expected: float) -> None:
    assert schedule(step) == pytest.approx(expected, abs=1e-15)


def test_the_prior_is_a_mix_schedule_without_warm_up() -> None:
    schedule = MixSchedule(peak=0.85, valley=0.15, hold=200, decay=600)
    assert [Prior()(t) for t in range(900)] == [schedule(t) for t in range(900)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Prior(high=1.2), "high=1.2: use a number in [0, 1]"),
        (lambda: Prior(low=math.nan), "low=nan"),
        (lambda: Prior(hold=-1), "hold=-1: use an integer >= 0"),
        (lambda: Prior(decay=1.5), "decay=1.5"),
        (lambda: MixSchedule(0.5, "0.1"), "valley='0.1'"),
        (lambda: MixSchedule(0.5, 0.1, warmup_shape="step"), "warmup_shape='step': use one of"),
        (lambda: MixSchedule(0.5, 0.1, decay_shape="step"), "decay_shape='step': use one of"),
    ],
)
def test_errors_name_argument_and_value(make, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
