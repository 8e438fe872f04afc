"""The controller against a direct transcription of the algorithm, and on random configurations."""

import doctest
import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gac.control.controller import (
    ControllerConfig,
    ControllerState,
    GuidedController,
    initial_state,
    next_alpha,
    step,
)
from gac.control.estimators import mu_star, mu_star_biased, mu_star_biased_paper
from gac.control.schedules import Prior
from gac.types import Corrections
from gac_kernels.contract import Signals

properties = settings(max_examples=200, deadline=None, derandomize=True)
unit_interval = st.floats(0, 1)


def inputs(steps: int, every: int = 10) -> list[tuple[Signals | None, float]]:
    """Signals at every refresh, and a per-step KL that leaves the band on both sides."""
    torch.manual_seed(1)
    noise = torch.rand(steps, 4, dtype=torch.float64).tolist()
    return [
        (Signals(0.3 * a, 0.8 * b, 4 * c) if t % every == 0 else None, 0.05 * k)
        for t, (a, b, c, k) in enumerate(noise)
    ]


def algorithm_1(steps: list[tuple[Signals | None, float]]) -> list[float]:
    """The paper's Algorithm 1, line by line, with its numbers and the contract's bounds."""
    beta, lam, cap, mu, alpha, kl, ema = 0.99, 0.5, 0.01, 0.5, 0.7, None, None
    out = []
    for t, (signals, kl_now) in enumerate(steps):
        if signals is not None:
            pairs = zip(ema or signals, signals, strict=True)
            ema = [0.99 * e + 0.01 * s if ema else s for e, s in pairs]
        kl = kl_now if kl is None else 0.9 * kl + 0.1 * kl_now
        ratio, s = kl / 0.02, 0.0
        if ratio > 1.1:
            s = 0.2 * (ratio - 1)
        if ratio < 0.9:
            s = -0.3 * (1 - ratio)
        alpha = min(max(alpha * math.exp(s), 0.1), 0.95)
        ss, sr, d = ema
        mu_ada = beta * mu + (1 - beta) * (alpha * d + sr) / (d + ss + sr)
        prior = 0.15 + 0.35 * (1 + math.cos(math.pi * min(max((t - 200) / 600, 0.0), 1.0)))
        blend = (1 - lam) * prior + lam * mu_ada
        mu = min(max(mu + min(max(blend - mu, -cap), cap), 0.02), 0.98)
        out.append(mu)
    return out


def test_paper_configuration_is_algorithm_1_as_printed() -> None:
    steps = inputs(1000)
    controller = GuidedController(ControllerConfig.paper())
    mus = [controller.update(*pair) for pair in steps]
    assert mus == pytest.approx(algorithm_1(steps), abs=1e-13)
    changed = ControllerConfig.paper(signal_decay=0.5)
    assert (changed.signal_decay, changed.ema) == (0.5, "literal")


def test_default_first_steps_by_hand() -> None:
    controller = GuidedController()
    signals = Signals(sft_variance=0.1, rl_variance=0.9, disagreement=1.0)
    assert controller.update(signals, kl=0.04) == 0.51  # the cap
    assert (controller.trust, repr(controller)) == (
        1.0,  # without a gate
        f"GuidedController({ControllerConfig()}, {controller.state})",
    )
    alpha = 0.7 * math.exp(0.2)
    target = (alpha + 0.9) / 2.0
    assert controller.alpha == pytest.approx(alpha, abs=1e-15)
    assert controller.mu_star == pytest.approx(target, abs=1e-15)
    assert controller.prior == 0.85
    assert controller.state.mu_ada == pytest.approx(0.495 + 0.01 * target, abs=1e-15)
    controller.update(kl=5.0)  # t = 1 is not a refresh step: alpha and the KL average do not change
    assert controller.alpha == pytest.approx(alpha, abs=1e-15)
    assert controller.state.kl == 0.04
    for call, wrong, message in (
        (GuidedController, {}, r"config is a dict: use ControllerConfig\("),
        (controller.update, (1.0, 2.0, 3.0), r"signals is a tuple: use moments.signals\("),
    ):
        with pytest.raises(TypeError, match=message):
            call(wrong)


def test_signal_averages_start_at_the_first_value_and_skip_nan() -> None:
    config = ControllerConfig(signal_decay=0.75)
    state = step(config, initial_state(config), Signals(1.0, math.nan, 2.0))
    assert (state.sft_variance, state.rl_variance, state.disagreement) == (1.0, None, 2.0)
    assert state.mu_star == state.alpha  # not all known yet
    state = step(config, state, Signals(3.0, 4.0, math.inf))
    assert (state.sft_variance, state.rl_variance, state.disagreement) == (1.5, 4.0, 2.0)
    assert state.mu_star == mu_star(0.7, 2.0, 1.5, 4.0)
    assert (
        step(replace(config, signal_decay=0.0), state, Signals(7.0, 8.0, 9.0)).disagreement == 9.0
    )


def test_nan_kl_changes_nothing_and_without_an_ema_mu_star_is_blended() -> None:
    controller = GuidedController(ControllerConfig(alpha_every="step"))
    for kl in (None, math.nan, math.inf):
        controller.update(kl=kl)
    assert controller.alpha == 0.7
    assert controller.state.kl is None
    controller = GuidedController(
        ControllerConfig(ema="none", prior_blend=1.0, max_step=1.0, signal_decay=0.0)
    )
    for signals in (Signals(1.0, 3.0, 0.0), Signals(3.0, 1.0, 0.0)):
        assert controller.update(signals) == controller.mu_star


def test_early_refresh_then_the_default() -> None:
    config = ControllerConfig(early_update_every=2, early_steps=5)
    assert [t for t in range(31) if config.is_refresh(t)] == [0, 2, 4, 10, 20, 30]
    assert [t for t in range(21) if ControllerConfig().is_refresh(t)] == [0, 10, 20]
    config = ControllerConfig(early_update_every=5, early_steps=5, update_every=3)
    assert [t for t in range(10) if config.is_refresh(t)] == [0, 6, 9]  # 5 is not early
    controller = GuidedController(config)
    assert controller.is_refresh()
    controller.update()
    assert not controller.is_refresh()


BIASED_PAPER = mu_star_biased_paper(0.7, 2.0, 0.5, 1.0, 0.3, bias_dot_gradient=0.1, bias_gap_sq=0.4)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("independent", mu_star(0.7, 2.0, 0.5, 1.0)),
        ("correlated", mu_star(0.7, 2.0, 0.5, 1.0, 0.3)),
        ("biased", mu_star_biased(0.7, 2.0, 0.5, 1.0, Corrections(0.3, 0.4, 0.1, 0.2, -0.1))),
        ("biased_paper", BIASED_PAPER),
    ],
)
def test_estimators_use_the_corrections(estimator: str, expected: float) -> None:
    controller = GuidedController(ControllerConfig(estimator=estimator))
    controller.update(Signals(0.5, 1.0, 2.0), corrections=Corrections(0.3, 0.4, 0.1, 0.2, -0.1))
    assert controller.mu_star == expected


def test_a_negative_unbiased_estimate_counts_as_zero_after_averaging() -> None:
    controller = GuidedController(ControllerConfig(signal_decay=0.5))
    controller.update(Signals(1.0, 3.0, -2.0))
    assert controller.mu_star == 0.75
    controller.update(Signals(1.0, 3.0, 6.0))  # the average keeps the sign: (-2 + 6) / 2
    assert controller.mu_star == mu_star(0.7, 2.0, 1.0, 3.0)
    for signals, expected in ((Signals(-1.0, 3.0, 0.0), 1.0), (Signals(1.0, -3.0, 0.0), 0.0)):
        for estimator in ("independent", "biased_paper"):
            controller = GuidedController(ControllerConfig(estimator=estimator))
            controller.update(signals, corrections=Corrections(bias_gap_sq=-1e-9))
            assert controller.mu_star == expected


def test_corrections_are_averaged_and_skip_nan() -> None:
    config = ControllerConfig(estimator="correlated", signal_decay=0.75)
    state = step(config, initial_state(config), corrections=Corrections(0.4, math.nan, 0.8))
    assert state.corrections == (0.4, 0.0, 0.8, 0.0, 0.0)
    state = step(config, state, corrections=Corrections(0.8, 2.0, math.inf, 4.0))
    assert state.corrections == pytest.approx((0.5, 0.5, 0.8, 1.0, 0.0), abs=1e-15)
    assert step(config, state).corrections == state.corrections


def test_fixed_points_of_the_two_averages() -> None:
    """As printed, the prior and mu* have weights 0.9901 and 0.0099; with an EMA state, 0.5 each."""
    signals = Signals(0.4, 0.6, 0.0)  # mu* = 0.6 for every alpha
    for prior in (0.1, 0.9):
        literal = GuidedController(ControllerConfig.paper(prior=Prior.constant(prior)))
        state = GuidedController(ControllerConfig(prior=Prior.constant(prior)))
        for _ in range(4000):
            literal.update(signals)
            state.update(signals)
        lam, beta = 0.5, 0.99
        share = lam * (1 - beta) / (1 - lam * beta)
        assert share == pytest.approx(0.0099, abs=1e-6)
        assert literal.mu == pytest.approx((1 - share) * prior + share * 0.6, abs=1e-12)
        assert state.mu == pytest.approx(0.5 * prior + 0.5 * 0.6, abs=1e-12)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.0181, 0.5),  # inside the band: unchanged
        (0.02, 0.5),
        (0.0219, 0.5),
        (0.03, 0.5 * math.exp(0.1)),
        (0.01, 0.5 * math.exp(-0.15)),
        (0.0, 0.5 * math.exp(-0.3)),
        (1e9, 0.95),  # exp would overflow
        (-0.02, 0.5 * math.exp(-0.6)),  # the k1 estimator may be negative
    ],
)
def test_hysteresis_values(kl: float, expected: float) -> None:
    assert next_alpha(ControllerConfig(), 0.5, kl) == pytest.approx(expected, abs=1e-15)


def test_kl_sign_reverses_the_direction() -> None:
    config = ControllerConfig(kl_sign=-1)
    assert next_alpha(config, 0.5, 0.03) == pytest.approx(0.5 * math.exp(-0.1), abs=1e-15)
    assert next_alpha(config, 0.5, 0.0) == pytest.approx(0.5 * math.exp(0.3), abs=1e-15)
    assert next_alpha(config, 0.5, -1e9) == 0.95  # exp would overflow


def test_alpha_does_not_change_at_the_ends_of_the_band() -> None:
    config = ControllerConfig(kl_target=0.5, kl_hysteresis=0.5)
    assert [next_alpha(config, 0.5, kl) for kl in (0.25, 0.75)] == [0.5, 0.5]


def test_without_kl_alpha_falls_to_its_floor_in_seven_updates() -> None:
    controller = GuidedController(ControllerConfig(alpha_every="step"))
    alphas = []
    for _ in range(7):
        controller.update(kl=0.0)
        alphas.append(controller.alpha)
    assert alphas[5] == pytest.approx(0.7 * math.exp(-1.8), abs=1e-12)
    assert alphas[6] == 0.1


@properties
@given(st.floats(0.1, 0.95), st.floats(0, 10), st.floats(0, 0.99))
@example(0.5, 0.03, 0.5)  # at the bounds
@example(0.5, 0.01, 0.5)
def test_alpha_moves_only_outside_the_band_and_stays_in_range(alpha, kl, band) -> None:
    after = next_alpha(ControllerConfig(kl_hysteresis=band), alpha, kl)
    assert 0.1 <= after <= 0.95
    ratio = kl / 0.02
    if 1 - band <= ratio <= 1 + band:
        assert after == alpha
    elif ratio > 1:
        assert after >= alpha
    else:
        assert after <= alpha


bounds = st.tuples(unit_interval, unit_interval).map(sorted)
signal = st.one_of(st.just(math.nan), st.floats(0, 1e6))
refresh = st.one_of(st.none(), st.builds(Signals, signal, signal, signal))
kls = st.one_of(st.none(), st.just(math.nan), st.floats(-1, 1e6))
observations = st.lists(st.tuples(refresh, kls), max_size=30)


@st.composite
def configs(draw) -> ControllerConfig:
    low, high = draw(bounds)
    alpha_low, alpha_high = draw(bounds)
    return ControllerConfig(
        ema=draw(st.sampled_from(["state", "literal", "none"])),
        ema_decay=draw(st.floats(0, 0.999)),
        prior_blend=draw(unit_interval),
        max_step=draw(unit_interval),
        update_every=draw(st.integers(1, 5)),
        early_update_every=draw(st.sampled_from([None, 1, 2])),
        early_steps=7,
        signal_decay=draw(st.floats(0, 0.99)),
        mu_init=draw(st.floats(low, high)),
        mu_min=low,
        mu_max=high,
        alpha_init=draw(st.floats(alpha_low, alpha_high)),
        alpha_min=alpha_low,
        alpha_max=alpha_high,
        kl_sign=draw(st.sampled_from([1, -1])),
        alpha_every=draw(st.sampled_from(["refresh", "step"])),
        prior=draw(st.sampled_from([Prior(hold=5, decay=10), lambda t: t % 2])),
    )


@properties
@given(configs(), observations)
def test_cap_and_ranges_hold_on_every_step(config: ControllerConfig, history) -> None:
    controller = GuidedController(config)
    for signals, kl in history:
        before = controller.mu
        mu = controller.update(signals, kl)
        assert config.mu_min <= mu <= config.mu_max
        assert abs(mu - before) <= config.max_step + 1e-15
        assert config.alpha_min <= controller.alpha <= config.alpha_max
        assert 0 <= controller.mu_star <= 1


@settings(properties, max_examples=60)
@given(configs(), observations)
def test_resuming_at_any_step_continues_bit_for_bit(config: ControllerConfig, history) -> None:
    uninterrupted = GuidedController(config)
    states = [uninterrupted.state_dict()]
    for pair in history:
        uninterrupted.update(*pair)
        states.append(uninterrupted.state_dict())
    for t, saved in enumerate(states):
        resumed = GuidedController(config)
        resumed.load_state_dict(json.loads(json.dumps(saved)))
        for pair in history[t:]:
            resumed.update(*pair)
        assert resumed.state == uninterrupted.state


def test_corrections_survive_a_checkpoint() -> None:
    config = ControllerConfig(estimator="biased")
    uninterrupted = GuidedController(config)
    uninterrupted.update(Signals(0.5, 1.0, 2.0), 0.03, Corrections(0.3, 0.4, 0.1, 0.2, -0.1))
    resumed = GuidedController(config)
    resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
    assert resumed.state == uninterrupted.state
    more = (Signals(0.1, 0.2, 0.3), 0.01, Corrections(0.1, 0.2))
    assert resumed.update(*more) == uninterrupted.update(*more)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ema": "mean"}, "ema='mean': use one of state, literal, none"),
        ({"ema_decay": 1.0}, "ema_decay=1.0: use a number in [0, 1)"),
        ({"prior_blend": 1.5}, "prior_blend=1.5"),
        ({"max_step": -0.01}, "max_step=-0.01: use a number >= 0"),
        ({"max_step": "1e-2"}, "max_step='1e-2'"),
        ({"mu_min": 0.9, "mu_max": 0.1}, "mu_min=0.9: use a number <= mu_max=0.1"),
        ({"mu_init": 0.99}, "mu_init=0.99: use a number in [0.02, 0.98]"),
        ({"alpha_init": math.nan}, "alpha_init=nan"),
        ({"kl_target": 0.0}, "kl_target=0.0: use a number > 0"),
        ({"kl_sign": 0}, "kl_sign=0: use 1 or -1"),
        ({"update_every": 0}, "update_every=0: use an integer >= 1"),
        ({"early_update_every": 0}, "early_update_every=0"),
        ({"estimator": "eq5"}, "estimator='eq5'"),
        ({"prior": 0.5}, "prior=0.5: use a callable"),
    ],
)
def test_config_errors_name_the_field(changes, message: str) -> None:
    with pytest.raises(ValueError) as error:
        ControllerConfig(**changes)
    assert message in str(error.value)


def test_a_prior_out_of_range_is_named_with_its_step() -> None:
    controller = GuidedController(ControllerConfig(prior=lambda t: 0.5 + t))
    controller.update()
    with pytest.raises(ValueError, match=r"prior\(1\)=1.5"):
        controller.update()
    with pytest.raises(ValueError, match=r"prior\(0\)=-0.5"):
        GuidedController(ControllerConfig(prior=lambda t: -0.5)).update()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"mu": math.nan}, "mu=nan"),
        ({"step": -1}, "step=-1"),
        ({"extra": 1}, "state=['extra']"),
        ({"corrections": [1.0]}, "corrections=[1.0]: use 5 numbers"),
        ({"corrections": [1.0, 2.0, 3.0, 4.0, math.inf]}, "corrections=inf: use a finite number"),
        ({"gate": [1.0, 2.0]}, "gate=[1.0, 2.0]: use 5 numbers"),
        ({"alarm": [1.0]}, "use a dict from to_plain()"),
        *(
            ({field.name: "x"}, f"{field.name}='x': use a finite number")
            for field in fields(ControllerState)
            if "float" in field.type and "tuple" not in field.type
        ),
    ],
)
def test_a_damaged_checkpoint_is_rejected_and_changes_nothing(damage, message: str) -> None:
    controller = GuidedController()
    before: ControllerState = controller.state
    with pytest.raises(ValueError) as error:
        controller.load_state_dict(controller.state_dict() | damage)
    assert message in str(error.value)
    assert controller.state == before


def test_every_entry_of_a_checkpoint_is_restored_as_a_number() -> None:
    names = [field.name for field in fields(ControllerState)]
    plain: dict = {name: i for i, name in enumerate(names)}
    plain |= {"corrections": [9, 8, 7, 6, 5], "gate": [4, 3, 2, 1, 0], "alarm": None}
    state = ControllerState.from_dict(plain)
    assert repr(state.to_dict()) == repr(
        {
            **{name: i if name == "step" else float(i) for i, name in enumerate(names)},
            "corrections": [9.0, 8.0, 7.0, 6.0, 5.0],
            "gate": [4.0, 3.0, 2.0, 1.0, 0.0],
            "alarm": None,
        }
    )
    del plain["mu"]
    for wrong, shown in ((plain, "['mu']"), ([], "[]")):
        with pytest.raises(ValueError, match=f"state={re.escape(shown)}: use a dict from state_"):
            ControllerState.from_dict(wrong)


def test_documentation_examples_are_correct() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "controller.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted >= 10
    assert result.failed == 0
