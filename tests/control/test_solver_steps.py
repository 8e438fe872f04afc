"""Solvers with learned weights: fixed points, steps computed by hand, and TorchJD as an oracle."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from gac.control.solvers import (
    DWAState,
    FAMOState,
    GradNormState,
    Gram,
    dwa_step,
    dwa_weights,
    famo_step,
    famo_weights,
    gradnorm_step,
    mgda,
    moco_step,
    nash_mtl,
    uncertainty_step,
    uncertainty_weights,
)


def losses(count: int) -> list[tuple[float, float]]:
    """Positive losses that fall slowly, at different speeds."""
    noise = torch.rand(count, 2, dtype=torch.float64).tolist()
    return [(2 * 0.97**t + 0.1 * a, 0.5 * 0.995**t + 0.1 * b) for t, (a, b) in enumerate(noise)]


def restored(state):
    """Round-trip the state through JSON, as a checkpoint does."""
    return type(state)(*json.loads(json.dumps(state)))


def test_gradnorm_first_step_by_hand() -> None:
    # norms 3 and 1 with weights 1, 1: mean 2, so w_s falls by 0.1 * 3 / 2, w_r rises by 0.1 / 2
    weights, state = gradnorm_step(GradNormState(), Gram(9.0, 0.0, 1.0), lr=0.1)
    assert weights == pytest.approx((2 * 0.85 / 1.9, 2 * 1.05 / 1.9), abs=1e-15)
    assert state.weights == weights and state.initial_losses is None
    weights, _ = gradnorm_step(GradNormState(), Gram(1.0, 0.0, 9.0), lr=0.1)
    assert weights == pytest.approx((2 * 1.05 / 1.9, 2 * 0.85 / 1.9), abs=1e-15)
    at_the_target = GradNormState((0.5, 1.5))  # weighted norms 1.5 and 1.5
    assert gradnorm_step(at_the_target, Gram(9.0, 0.0, 1.0))[0] == (0.5, 1.5)


@pytest.mark.parametrize(
    ("sft", "rl", "signs"),
    [(0.45, 1.55, (-1, 1)), (0.44, 1.56, (1, 1)), (0.23, 1.77, (1, 1)), (0.22, 1.78, (1, -1))],
)
def test_gradnorm_targets_by_hand(sft: float, rl: float, signs) -> None:
    """Losses 1/4 and 1/2 of the first have rates 2/3 and 4/3, with squares 0.444 and 1.778.

    The two norms have the mean 1.
    """
    state = GradNormState(initial_losses=(4.0, 3.0))
    gram = Gram(sft**2, 0.0, rl**2)
    weights, after = gradnorm_step(state, gram, (1.0, 1.5), asymmetry=2.0, lr=0.1)
    s, r = 1 + 0.1 * signs[0] * sft, 1 + 0.1 * signs[1] * rl
    assert weights == pytest.approx((2 * s / (s + r), 2 * r / (s + r)), abs=1e-12)
    assert after == (weights, (4.0, 3.0))


def test_gradnorm_without_asymmetry_converges_to_the_nash_direction() -> None:
    gram, state = Gram(9.0, -0.3, 0.25), GradNormState()
    for t in range(3000):
        weights, state = gradnorm_step(state, gram, lr=0.05 / (1 + 0.05 * t))
    nash = nash_mtl(gram)
    assert sum(weights) == pytest.approx(2, abs=1e-12)
    assert weights[0] / 2 == pytest.approx(nash[0] / sum(nash), abs=2e-3)


def test_gradnorm_asymmetry_favors_the_objective_that_lags() -> None:
    gram = Gram(1.0, 0.0, 1.0)
    _, state = gradnorm_step(GradNormState(), gram, (2.0, 3.0), asymmetry=1.5)
    assert state.initial_losses == (2.0, 3.0)
    # SFT fell to a tenth, RL did not: its target is (2 * 3 / 3.3)^1.5 of the mean, so w_r rises
    weights, state = gradnorm_step(state, gram, (0.2, 3.0), asymmetry=1.5)
    assert weights[1] > 1 > weights[0]
    from_checkpoint, _ = gradnorm_step(restored(state), gram, (0.2, 3.0), asymmetry=1.5)
    assert from_checkpoint == gradnorm_step(state, gram, (0.2, 3.0), asymmetry=1.5)[0]


def test_gradnorm_keeps_its_state_when_it_skips() -> None:
    state = GradNormState((0.5, 1.5))
    assert gradnorm_step(state, Gram(math.nan, 0.0, 1.0)) == (None, state)
    assert gradnorm_step(state, Gram(0.0, 0.0, 0.0)) == (None, state)
    skipped = gradnorm_step(state, Gram(1.0, 0.0, 1.0), (math.nan, 1.0), asymmetry=1.0)
    assert skipped == (None, state)
    weights, _ = gradnorm_step(state, Gram(1.0, 0.0, 0.0), lr=100.0)
    assert weights == pytest.approx((2 * 0.001 / 1.501, 2 * 1.5 / 1.501))  # the smallest weight


def test_moco_first_step_by_hand() -> None:
    # G / trace = [[0.8, -0.2], [-0.2, 0.2]] at (1/2, 1/2): v = (0.5 - 0.03, 0.5)
    weights, state = moco_step((0.5, 0.5), Gram(8.0, -2.0, 2.0), lr=0.1)
    assert weights == state == pytest.approx((0.485, 0.515), abs=1e-15)
    # regularization=1 subtracts a further (0.1 * 0.9, 0.1 * 0.1)
    weights, _ = moco_step((0.9, 0.1), Gram(8.0, -2.0, 2.0), lr=0.1, regularization=1.0)
    v_s, v_r = 0.9 - 0.1 * (1.62 - 0.02), 0.1 - 0.1 * (-0.18 + 0.12)
    assert weights[0] == pytest.approx((v_s - v_r + 1) / 2, abs=1e-15)


@pytest.mark.parametrize(
    "gram", [Gram(9.0, -0.5, 1.0), Gram(1.0, 0.9, 25.0), Gram(1e-6, 1e-7, 2e-6)]
)
def test_moco_on_a_fixed_gram_converges_to_mgda(gram: Gram) -> None:
    state = (0.5, 0.5)
    for _ in range(3000):
        weights, state = moco_step(state, gram)
    assert weights == pytest.approx(mgda(gram), abs=1e-6)


def test_moco_edge_cases() -> None:
    assert moco_step((0.9, 0.1), Gram(0.0, 0.0, 4.0), lr=10.0)[0] == (1.0, 0.0)
    assert moco_step((0.1, 0.9), Gram(4.0, 0.0, 0.0), lr=10.0)[0] == (0.0, 1.0)
    assert moco_step((0.3, 0.7), Gram(0.0, 0.0, 0.0))[0] == pytest.approx((0.3, 0.7), abs=1e-15)
    assert moco_step((0.3, 0.7), Gram(1.0, math.inf, 1.0)) == (None, (0.3, 0.7))


def test_uncertainty_step_is_the_gradient_of_its_loss() -> None:
    s = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    values = torch.tensor([2.0, 0.1], dtype=torch.float64)
    (0.5 * torch.exp(-s) * values + 0.5 * s).sum().backward()
    stepped = uncertainty_step((0.3, -0.4), (2.0, 0.1), lr=0.1)
    assert stepped == pytest.approx((s - 0.1 * s.grad).tolist(), abs=1e-15)


def test_uncertainty_weights_converge_to_half_the_inverse_losses() -> None:
    state = (0.0, 0.0)
    for _ in range(2000):
        state = uncertainty_step(state, (2.0, 0.1), lr=0.1)
    assert uncertainty_weights(state) == pytest.approx((0.25, 5.0), rel=1e-9)
    for _ in range(3000):
        state = uncertainty_step(state, (2.0, 0.0), lr=0.1)
    assert state[1] == -6.0  # a loss of 0 stops at the bound
    assert uncertainty_step((0.0, 0.0), (99.0, 0.0), lr=10.0, bound=2.0) == (2.0, -2.0)
    assert uncertainty_step(state, (math.nan, 1.0)) is None


def test_dwa_values_by_hand() -> None:
    state = DWAState()
    for pair in [(2.0, 1.0), (4.0, 1.0), (1.5, 2.0)]:
        assert dwa_weights(state) == (1.0, 1.0)
        state = dwa_step(state, pair, window=2)
    state = dwa_step(state, (1.5, 0.0), window=2)  # means (3, 1), then (1.5, 1): ratios 1/2, 1
    s, r = math.exp(0.25), math.exp(0.5)
    assert state == DWAState(newer=(1.5, 1.0), older=(3.0, 1.0))
    assert dwa_weights(state) == pytest.approx((2 * s / (s + r), 2 * r / (s + r)), abs=1e-8)
    assert dwa_weights(restored(state)) == dwa_weights(state)


def test_dwa_with_losses_that_reach_zero_and_that_are_not_finite() -> None:
    state = DWAState(newer=(0.0, 1.0), older=(1.0, 0.0))  # 1 / 0 is huge
    assert dwa_weights(state) == pytest.approx((0.0, 2.0))
    s, r = math.exp(0.25), math.exp(0.75)  # 0 / 0 counts as 1
    state = DWAState(newer=(0.0, 3.0), older=(0.0, 1.0))
    assert dwa_weights(state, 4.0) == pytest.approx((2 * s / (s + r), 2 * r / (s + r)))
    assert dwa_step(state, (math.inf, 1.0)) is None


def test_famo_weights_by_hand() -> None:
    state = FAMOState(logits=(math.log(3), 0.0))  # z = (3/4, 1/4)
    s, r = famo_weights(state, (2.0, 1.5), minimum=(0.0, 0.5))  # z / gap = 3/8, 1/4
    assert (s, r) == pytest.approx((0.6, 0.4), abs=1e-8)


def test_famo_gives_more_weight_to_the_loss_that_falls_more_slowly() -> None:
    state = FAMOState()
    for _ in range(50):
        state = famo_step(state, (1.0, 1.0), (0.9, 0.99))
    assert state.logits[0] < -0.5 and state.logits[1] > 0.5


def test_famo_takes_adam_steps_on_its_logits() -> None:
    logits = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    adam, state = torch.optim.Adam([logits], lr=0.05, weight_decay=0.1), FAMOState((0.3, -0.2))
    for before, after in itertools.pairwise(losses(5)):
        decrease = (torch.tensor(before).double() / torch.tensor(after)).log()
        adam.zero_grad()
        (logits.softmax(0) @ decrease).backward()
        adam.step()
        state = famo_step(state, before, after, lr=0.05, decay=0.1)
        assert state.logits == pytest.approx(logits.tolist(), rel=1e-6)
    assert state.steps == 4


def test_famo_minimum_is_subtracted_from_all_losses() -> None:
    state = FAMOState((0.2, -0.3), (0.1, -0.1), (0.04, 0.01), 3)
    shifted = famo_step(state, (3.0, 2.5), (2.0, 2.25), minimum=(1.0, 0.5))
    assert shifted == famo_step(state, (2.0, 2.0), (1.0, 1.75)) and shifted.steps == 4
    assert famo_step(state, (3.0, 2.5), (math.nan, 2.25)) is None


def test_famo_keeps_equal_weights_for_equal_decreases() -> None:
    state = famo_step(FAMOState(), (2.0, 2.0), (1.0, 1.0))
    assert state.logits == (0.0, 0.0) and state.steps == 1
    assert famo_step(state, (math.nan, 1.0), (1.0, 1.0)) is None
    assert famo_weights(state, (1.0, math.inf)) is None
    assert famo_weights(state, (1.0, 0.0)) == pytest.approx((0.0, 1.0), abs=1e-7)


def gradnorm_with_losses(values):
    return gradnorm_step(GradNormState(), Gram(1, 0, 1), values, asymmetry=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradnorm_with_losses(None), "losses=None"),
        (lambda: gradnorm_with_losses((0.0, 1.0)), "losses=(0.0, 1.0): use positive losses"),
        (lambda: gradnorm_step(GradNormState(), Gram(1, 0, 1), asymmetry="1"), "asymmetry='1'"),
        (lambda: moco_step((0.5, 0.5), Gram(1, 0, 1), lr=-1), "lr=-1"),
        (lambda: dwa_step(DWAState(), (-0.1, 1.0)), "losses=(-0.1, 1.0): use losses >= 0"),
        (lambda: dwa_step(DWAState(), (1.0, 1.0), window=0), "window=0"),
        (lambda: dwa_weights(DWAState(), temperature=0.0), "temperature=0.0"),
        (
            lambda: famo_weights(FAMOState(), (1.0, -0.2)),
            "losses=(1.0, -0.2): use losses that are at least min",
        ),
    ],
)
def test_errors_name_argument_and_value(call, message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def torchjd_scalarization():
    reason = "torchjd is an optional test oracle"
    return pytest.importorskip("torchjd.scalarization", reason=reason)


def torchjd_weights(scalarizer, pair) -> list[float]:
    values = torch.tensor(pair, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(scalarizer(values), values)[0].tolist()


def test_dwa_agrees_with_torchjd() -> None:
    scalarizer, state = torchjd_scalarization().DWA(2.0), DWAState()
    for t, pair in enumerate(losses(40)):
        assert dwa_weights(state) == pytest.approx(torchjd_weights(scalarizer, pair), abs=1e-7)
        state = dwa_step(state, pair, window=5)
        if t % 5 == 4:
            scalarizer.step()


def test_uncertainty_weighting_agrees_with_torchjd() -> None:
    scalarizer, state = torchjd_scalarization().UW(2).double(), (0.0, 0.0)
    for pair in losses(40):
        assert uncertainty_weights(state) == pytest.approx(
            torchjd_weights(scalarizer, pair), abs=1e-12
        )
        loss = scalarizer(torch.tensor(pair, dtype=torch.float64))
        (slope,) = torch.autograd.grad(loss, scalarizer.log_var)
        with torch.no_grad():
            scalarizer.log_var -= 0.1 * slope
        state = uncertainty_step(state, pair, lr=0.1)


def test_famo_agrees_with_torchjd_over_a_resumed_run() -> None:
    scalarizer, state = torchjd_scalarization().FAMO(2).double(), FAMOState()
    pairs = losses(41)
    for t, (before, after) in enumerate(itertools.pairwise(pairs)):
        state = restored(state) if t == 20 else state
        expected = torchjd_weights(scalarizer, before)
        assert famo_weights(state, before) == pytest.approx(expected, abs=1e-9)
        scalarizer.update(torch.tensor(after, dtype=torch.float64))
        state = famo_step(state, before, after)
