"""Ablations of the controller: misspecified priors, options switched off."""

import itertools

import pytest

from gac.config import dump, load
from gac.methods import Observation
from gac.train_config import TrainConfig
from gac_kernels import Signals
from research.ablations import ABLATIONS


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
    assert refreshed == [0, *range(1, 20, 2)]
    assert ablated("gac-no-trim").needs(0).trim == 0.0
    assert all(ablated(label) != ablated("gac") for label in ABLATIONS)
    assert {label for label in ABLATIONS if ablated(label).needs(0).parts} == {
        "gac-covariance",
        "gac-biased",
        "gac-biased-paper",
        "oracle",
    }
