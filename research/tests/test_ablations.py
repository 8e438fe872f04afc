"""Ablations of the controller: misspecified priors, options switched off."""

import itertools

import pytest

from gac.config import dump, load
from gac.methods import Observation
from gac.train_config import TrainConfig
from gac.types import Evidence
from gac_kernels import Signals, TokenMoments
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


MU_STAR = (0.7 * 0.4 + 0.5) / (0.4 + 0.1 + 0.5)
AVERAGE = 0.99 * 0.5 + 0.01 * MU_STAR  # of the first step


@pytest.mark.parametrize(
    ("label", "changes", "first"),
    [
        ("oracle", {}, MU_STAR),
        ("gac-no-ema", {"max_step": 1.0}, 0.5 * 0.85 + 0.5 * MU_STAR),
        ("gac-no-prior", {"max_step": 1.0}, AVERAGE),
        ("gac-no-cap", {}, 0.5 * 0.85 + 0.5 * AVERAGE),
    ],
)
def test_the_first_mu_by_hand(label, changes, first):
    assert mus(label, **changes)[0] == pytest.approx(first)


def test_the_cap_limits_every_change():
    assert max(abs(b - a) for a, b in itertools.pairwise(mus("gac"))) <= 0.01 + 1e-12


def test_a_low_and_a_high_prior_pull_mu():
    assert mus("gac-prior-low")[-1] < mus("gac")[-1] < mus("gac-prior-high")[-1]


def test_early_refreshes_measure_every_second_step():
    refreshed = [t for t in range(20) if ablated("gac-early-refresh").needs(t).signals]
    assert refreshed == [0, *range(1, 20, 2)]


def test_the_proxies_can_be_left_untrimmed():
    assert ablated("gac-no-trim").needs(0).trim == 0.0


def test_every_ablation_differs_from_gac():
    assert all(ablated(label) != ablated("gac") for label in ABLATIONS)


def test_fixed_mu_with_ema_moves_to_its_value_by_the_average_alone():
    """Table 7's second row: m <- 0.99 m + 0.01 x 0.58 from 0.5, whatever is measured."""
    method = ablated("fixed-mu-ema").for_run(60)
    state, m = method.init(), 0.5
    for step in range(60):
        evidence = Evidence(step, TokenMoments.zeros()) if method.needs(step - 1).signals else None
        state, mix = method.mix(state, Observation(step, kl=0.5 * step, evidence=evidence))
        m = 0.99 * m + 0.01 * 0.58
        assert mix.mu == pytest.approx(m)
    assert method.weight == "one"


def test_these_ablations_need_gradients_of_parts():
    measured = {label for label in ABLATIONS if ablated(label).needs(0).parts}
    assert measured == {"gac-covariance", "gac-biased", "gac-biased-paper", "oracle"}
