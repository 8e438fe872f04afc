"""Ablations of the controller: degraded signals, misspecified priors, options switched off."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from gac.config import dump, load
from gac.control.signals import Evidence, ProxySignals, Reading
from gac.methods import Observation
from gac.train_config import TrainConfig
from gac_kernels import Signals
from tools.ablations import (
    ABLATIONS,
    ConstantVariance,
    DegradedSignals,
    RandomDisagreement,
    RandomPrior,
    ShuffledDisagreement,
    uniform,
)


def ablated(label: str, **changes):
    config = load(TrainConfig, {"method": {"name": "gac", **ABLATIONS.get(label, {}), **changes}})
    assert load(TrainConfig, dump(config)) == config
    return config.method


def mus(label: str, steps: int = 60, **changes) -> list[float]:
    """mu of each step with constant signals."""
    method = ablated(label, **changes)
    state, mu = method.init(), []
    for step in range(steps):
        state, mix = method.mix(state, Observation(step, Signals(0.1, 0.5, 0.4)))
        mu.append(mix.mu)
    return mu


def test_each_setting_does_what_it_says():
    mu_star = (0.7 * 0.4 + 0.5) / (0.4 + 0.1 + 0.5)
    m = 0.99 * 0.5 + 0.01 * mu_star
    base = mus("gac")
    assert max(abs(b - a) for a, b in itertools.pairwise(base)) <= 0.01 + 1e-12
    assert mus("oracle")[0] == pytest.approx(mu_star)
    assert mus("gac-no-ema", max_step=1.0)[0] == pytest.approx(0.5 * 0.85 + 0.5 * mu_star)
    assert mus("gac-no-prior", max_step=1.0)[0] == pytest.approx(m)
    assert mus("gac-no-cap")[0] == pytest.approx(0.5 * 0.85 + 0.5 * m)
    assert mus("gac-prior-low")[-1] < base[-1] < mus("gac-prior-high")[-1]
    refreshed = [t for t in range(20) if ablated("gac-early-refresh").needs(t).signals]
    assert refreshed == [0, *range(1, 20, 2)] and ablated("gac-no-trim").needs(0).trim == 0.0
    plain = ablated("gac")
    assert all(ablated(label) != plain for label in ABLATIONS)
    assert {label for label in ABLATIONS if ablated(label).needs(0).parts} == {
        "gac-covariance",
        "gac-biased",
        "gac-biased-paper",
        "oracle",
    }


class Steps(ProxySignals):
    """A source whose disagreement is the step."""

    def read(self, evidence, state):
        return Reading(Signals(1.0, 2.0, float(evidence.step))), state


def read_all(source, steps, state=None):
    state, signals = source.init() if state is None else state, []
    for step in steps:
        reading, state = source.read(Evidence(step), state)
        signals.append(reading.signals)
    return signals, state


def test_one_signal_is_replaced():
    noise = [0.25 + 0.5 * uniform("disagreement", 4, step) for step in range(3)]
    sources = ConstantVariance(Steps(), 3.0), RandomDisagreement(Steps(), 0.25, 0.75, seed=4)
    constant, random = (read_all(source, range(3))[0] for source in sources)
    assert constant == [Signals(1.0, 3.0, float(step)) for step in range(3)]
    assert random == [Signals(1.0, 2.0, pytest.approx(value, abs=1e-15)) for value in noise]
    assert ConstantVariance(Steps()).needs == Steps().needs
    with pytest.raises(NotImplementedError):
        DegradedSignals().degrade(Signals(1, 2, 3), 0)


def test_shuffling_draws_from_the_last_refreshes_and_resumes():
    """The draws of seed 1 are 0.64, 0.35, 0.89, 0.85, 0.24, 0.19, 0.51 and 0.18."""
    source = ShuffledDisagreement(Steps(), window=3, seed=1)
    signals, state = read_all(source, range(8))
    assert [s.disagreement for s in signals] == [0, 0, 2, 3, 2, 3, 5, 5]
    assert signals[0][:2] == (1.0, 2.0) and state == {"source": {}, "past": [5.0, 6.0, 7.0]}
    first, half = read_all(source, range(5))
    rest, end = read_all(source, range(5, 8), json.loads(json.dumps(half)))
    assert (first + rest, end) == (signals, state)
    reading, state = source.read(Evidence(math.nan), source.init())
    assert math.isnan(reading.signals.disagreement) and state["past"] == []


def test_random_values_depend_only_on_name_seed_and_index():
    """All ranks and resumed runs see the same values."""
    assert uniform("prior", 0, 0) == 0.9881898122568942
    assert uniform("prior", 0, 1) != uniform("prior", 1, 0) != uniform("shuffle", 1, 0)
    prior = RandomPrior(low=0.25, high=0.75, interval=5, seed=3)
    for step in (0, 4, 5, 9, 10, 2019):
        assert prior(step) == pytest.approx(0.25 + 0.5 * uniform("prior", 3, step // 5), abs=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomPrior(low=0.9, high=0.1), "low=0.9: use a number <= high=0.1"),
        (lambda: RandomPrior(high=1.2), "low=0.1: use numbers in [0, 1]"),
        (lambda: RandomPrior(interval=0), "interval=0: use an integer >= 1"),
        (lambda: ConstantVariance(value=-1.0), "value=-1.0: use a number >= 0"),
        (lambda: ShuffledDisagreement(window=1), "window=1: use an integer >= 2"),
        (lambda: RandomDisagreement(low=2.0), "high=1.0: use a number >= low=2.0"),
    ],
)
def test_errors_name_argument_and_value(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
