"""Solvers with learned weights: fixed points, steps computed by hand, and TorchJD as an oracle."""

import itertools
import json
import math

import pytest
import torch

from gac.methods import METHODS, Observation
from gac.methods.solvers import Gram
from gac.types import TermPair


def losses(count: int) -> list[tuple[float, float]]:
    """Positive losses that fall slowly, at different speeds."""
    noise = torch.rand(count, 2, dtype=torch.float64).tolist()
    return [(2 * 0.97**t + 0.1 * a, 0.5 * 0.995**t + 0.1 * b) for t, (a, b) in enumerate(noise)]


def seen(demo: float, rollout: float) -> Observation:
    """An observation with these losses; that of RL is 1 - mean reward."""
    return Observation(1, demo_loss=demo, reward_mean=1 - rollout)


def weights_of(mix) -> tuple[float, float]:
    return tuple(mix.pair)


def restored(state):
    """Round-trip the state through JSON, as a checkpoint does."""
    return json.loads(json.dumps(state))


# ---- GradNorm


def gradnorm(gram, state=None, **fields):
    method = METHODS["gradnorm"](**fields)
    state, weights = method.weights({**method.init(), **(state or {})}, gram)
    return weights, state


def test_gradnorm_first_step_by_hand() -> None:
    # norms 3 and 1 with weights 1, 1: mean 2, so w_s falls by 0.1 * 3 / 2, w_r rises by 0.1 / 2
    weights, state = gradnorm(Gram(9.0, 0.0, 1.0), lr=0.1)
    assert weights == pytest.approx((2 * 0.85 / 1.9, 2 * 1.05 / 1.9), abs=1e-15)
    assert state["weights"] == list(weights)
    assert state["initial"] is None
    weights, _ = gradnorm(Gram(1.0, 0.0, 9.0), lr=0.1)
    assert weights == pytest.approx((2 * 1.05 / 1.9, 2 * 0.85 / 1.9), abs=1e-15)
    # the weighted norms 1.5 and 1.5 are the target
    assert gradnorm(Gram(9.0, 0.0, 1.0), {"weights": [0.5, 1.5]})[0] == (0.5, 1.5)


@pytest.mark.parametrize(
    ("power", "sft", "rl", "signs"),
    [
        (2.0, 0.45, 1.55, (-1, 1)),
        (2.0, 0.44, 1.56, (1, 1)),
        (2.0, 0.23, 1.77, (1, 1)),
        (2.0, 0.22, 1.78, (1, -1)),
        (1.0, 0.70, 1.30, (-1, 1)),
    ],
)
def test_gradnorm_targets_by_hand(power: float, sft: float, rl: float, signs) -> None:
    """Losses 1/4 and 1/2 of the first have rates 2/3 and 4/3, with squares 0.444 and 1.778.

    The two norms have the mean 1.
    """
    state = {"initial": [4.0, 3.0], "losses": [1.0, 1.5]}
    weights, after = gradnorm(Gram(sft**2, 0.0, rl**2), state, asymmetry=power, lr=0.1)
    s, r = 1 + 0.1 * signs[0] * sft, 1 + 0.1 * signs[1] * rl
    assert weights == pytest.approx((2 * s / (s + r), 2 * r / (s + r)), abs=1e-12)
    assert (after["weights"], after["initial"]) == (list(weights), [4.0, 3.0])


def test_gradnorm_without_asymmetry_converges_to_the_nash_direction() -> None:
    gram, state = Gram(9.0, -0.3, 0.25), None
    for t in range(3000):
        weights, state = gradnorm(gram, state, lr=0.05 / (1 + 0.05 * t), asymmetry=0.0)
    nash = METHODS["nash-mtl"]().closed_form(gram)
    assert sum(weights) == pytest.approx(2, abs=1e-12)
    assert weights[0] / 2 == pytest.approx(nash[0] / sum(nash), abs=2e-3)


def test_gradnorm_asymmetry_favors_the_objective_that_lags() -> None:
    method, gram = METHODS["gradnorm"](), Gram(1.0, 0.0, 1.0)
    state, _ = method.mix(method.init(), seen(2.0, 0.75))
    state, _ = method.weights(state, gram)
    assert state["initial"] == [2.0, 0.75]
    # SFT fell to a tenth, RL did not, so w_r rises
    state, mix = method.mix(restored(state), seen(0.2, 0.75))
    assert mix.mu == 0.5  # `solve` replaces it
    _, weights = method.weights(state, gram)
    assert weights[1] > 1 > weights[0]


def test_gradnorm_keeps_its_weights_when_it_skips() -> None:
    assert gradnorm(Gram(0.0, 0.0, 0.0), {"weights": [0.5, 1.5]})[0] is None
    weights, _ = gradnorm(Gram(1.0, 0.0, 0.0), {"weights": [0.5, 1.5]}, lr=100.0)
    assert weights == pytest.approx((2 * 0.001 / 1.501, 2 * 1.5 / 1.501))  # the smallest weight
    method = METHODS["gradnorm"]()
    state, _ = method.mix(method.init(), seen(math.nan, 1.0))
    assert state["losses"] is None


# ---- MoCo


def moco(start, gram, **fields):
    method = METHODS["moco"](**fields)
    return method.weights({**method.init(), "weights": list(start)}, gram)[1]


def test_moco_first_step_by_hand() -> None:
    # G / trace = [[0.8, -0.2], [-0.2, 0.2]] at (1/2, 1/2): v = (0.5 - 0.03, 0.5)
    assert moco((0.5, 0.5), Gram(8.0, -2.0, 2.0)) == pytest.approx((0.485, 0.515), abs=1e-15)
    # regularization=1 subtracts a further (0.1 * 0.9, 0.1 * 0.1)
    weights = moco((0.9, 0.1), Gram(8.0, -2.0, 2.0), regularization=1.0)
    v_s, v_r = 0.9 - 0.1 * (1.62 - 0.02), 0.1 - 0.1 * (-0.18 + 0.12)
    assert weights[0] == pytest.approx((v_s - v_r + 1) / 2, abs=1e-15)
    assert moco((0.9, 0.1), Gram(0.0, 0.0, 4.0), lr=10.0) == (1.0, 0.0)
    assert moco((0.1, 0.9), Gram(4.0, 0.0, 0.0), lr=10.0) == (0.0, 1.0)
    assert moco((0.3, 0.7), Gram(0.0, 0.0, 0.0)) == pytest.approx((0.3, 0.7), abs=1e-15)


def test_moco_rates_decay_with_the_step() -> None:
    method = METHODS["moco"](rate=0.2, lr=0.4)
    assert [method.needs(step).average for step in (0, 3)] == [0.2, pytest.approx(0.1)]
    state, _ = method.mix(method.init(), Observation(3))
    _, late = method.weights(state, Gram(8.0, -2.0, 2.0))
    assert late == pytest.approx(moco((0.5, 0.5), Gram(8.0, -2.0, 2.0), lr=0.2), abs=1e-15)


@pytest.mark.parametrize(
    "gram", [Gram(9.0, -0.5, 1.0), Gram(1.0, 0.9, 25.0), Gram(1e-6, 1e-7, 2e-6)]
)
def test_moco_on_a_fixed_gram_converges_to_mgda(gram: Gram) -> None:
    weights = (0.5, 0.5)
    for _ in range(3000):
        weights = moco(weights, gram)
    assert weights == pytest.approx(METHODS["mgda"]().closed_form(gram), abs=1e-6)


# ---- uncertainty


def test_uncertainty_step_is_the_gradient_of_its_loss() -> None:
    s = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    (0.5 * (-s).exp() * s.new_tensor([2.0, 0.1]) + 0.5 * s).sum().backward()
    state, _ = METHODS["uncertainty"](lr=0.1).mix({"log_variances": [0.3, -0.4]}, seen(2.0, 0.1))
    assert state["log_variances"] == pytest.approx((s - 0.1 * s.grad).tolist(), abs=1e-15)


def test_uncertainty_weights_converge_to_half_the_inverse_losses() -> None:
    method = METHODS["uncertainty"](lr=0.1)
    state, mix = method.mix(method.init(), Observation(0))
    assert weights_of(mix) == (0.5, 0.5)
    for _ in range(2000):
        state, mix = method.mix(state, seen(2.0, 0.1))
    assert weights_of(mix) == pytest.approx((0.25, 5.0), rel=1e-9)
    assert method.mix(state, seen(math.nan, 1.0)) == (state, mix)
    fast = METHODS["uncertainty"](lr=100.0)
    state, _ = fast.mix(fast.init(), seen(9.0, 0.5))
    assert state == {"log_variances": [6.0, -6.0]}


# ---- DWA


def test_dwa_values_by_hand() -> None:
    method = METHODS["dwa"](window=2)
    state = method.init()
    for pair in [(2.0, 0.5), (4.0, 0.5), (1.5, 0.75)]:
        state, mix = method.mix(state, seen(*pair))
        assert weights_of(mix) == (1.0, 1.0)
    # means (3, 0.5), then (1.5, 0.5): ratios 1/2, 1
    state, mix = method.mix(restored(state), seen(1.5, 0.25))
    s, r = math.exp(0.25), math.exp(0.5)
    assert (state["newer"], state["older"]) == ([1.5, 0.5], [3.0, 0.5])
    assert weights_of(mix) == pytest.approx((2 * s / (s + r), 2 * r / (s + r)), abs=1e-8)
    assert method.mix(state, seen(math.inf, 0.5)) == (state, mix)
    state = {**state, "newer": [0.0, 3.0], "older": [0.0, 1.0]}  # 0 / 0 counts as 1
    _, mix = METHODS["dwa"](temperature=4.0).mix(state, Observation(1))
    s, r = math.exp(0.25), math.exp(0.75)
    assert weights_of(mix) == pytest.approx((2 * s / (s + r), 2 * r / (s + r)))


# ---- FAMO


def famo_step(state, before, after, **fields):
    method = METHODS["famo"](**{"rollout_floor": 0.0, **fields})
    last = Observation(1, losses_before=TermPair(*before), losses_after=TermPair(*after))
    return method.mix({**method.init(), **state}, last)


def test_famo_weights_by_hand() -> None:
    state = {"logits": [math.log(3), 0.0], "losses": [2.0, 1.5]}  # z = (3/4, 1/4)
    method = METHODS["famo"](rollout_floor=0.5)
    _, mix = method.mix({**method.init(), **state}, Observation(1))  # z / gap = 3/8, 1/4
    assert weights_of(mix) == pytest.approx((0.6, 0.4), abs=1e-8)
    assert method.mix(method.init(), Observation(0))[1].mu == 0.5


def test_famo_takes_adam_steps_on_its_logits() -> None:
    logits = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    adam, state = torch.optim.Adam([logits], lr=0.05, weight_decay=0.1), {"logits": [0.3, -0.2]}
    for before, after in itertools.pairwise(losses(5)):
        decrease = (torch.tensor(before).double() / torch.tensor(after)).log()
        adam.zero_grad()
        (logits.softmax(0) @ decrease).backward()
        adam.step()
        state, _ = famo_step(state, before, after, lr=0.05, decay=0.1)
        assert state["logits"] == pytest.approx(logits.tolist(), rel=1e-6)
    assert state["steps"] == 4
    assert state["losses"] == list(before)
    assert famo_step(state, (1.0, 1.0), (math.nan, 1.0))[0] == state


def test_famo_floors_and_equal_decreases() -> None:
    state = {"logits": [0.2, -0.3], "first": [0.1, -0.1], "second": [0.04, 0.01], "steps": 3}
    shifted, _ = famo_step(state, (3.0, 2.5), (2.0, 2.25), rollout_floor=0.5)
    plain, _ = famo_step(state, (3.0, 2.0), (2.0, 1.75))
    assert shifted["logits"] == plain["logits"]
    below, mix = famo_step(state, (3.0, -9.0), (2.0, 1.75))  # raised to the floor
    assert below == famo_step(state, (3.0, 0.0), (2.0, 1.75))[0] | {"losses": [3.0, -9.0]}
    assert mix.mu == pytest.approx(0.0, abs=1e-7)
    assert famo_step({}, (2.0, 2.0), (1.0, 1.0))[0]["logits"] == [0.0, 0.0]


# ---- TorchJD


def torchjd_scalarization():
    return pytest.importorskip("torchjd.scalarization", reason="torchjd is an optional test oracle")


def torchjd_weights(scalarizer, pair) -> list[float]:
    values = torch.tensor(pair, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(scalarizer(values), values)[0].tolist()


def test_dwa_agrees_with_torchjd() -> None:
    scalarizer, method = torchjd_scalarization().DWA(2.0), METHODS["dwa"](window=5)
    state = method.init()
    for t, pair in enumerate(losses(40)):
        mix = method.mix(state, Observation(0))[1]
        assert weights_of(mix) == pytest.approx(torchjd_weights(scalarizer, pair), abs=1e-7)
        state, _ = method.mix(state, seen(*pair))
        if t % 5 == 4:
            scalarizer.step()


def test_uncertainty_weighting_agrees_with_torchjd() -> None:
    scalarizer, method = torchjd_scalarization().UW(2).double(), METHODS["uncertainty"](lr=0.1)
    state, mix = method.mix(method.init(), Observation(0))
    for pair in losses(40):
        assert weights_of(mix) == pytest.approx(torchjd_weights(scalarizer, pair), abs=1e-12)
        loss = scalarizer(torch.tensor(pair, dtype=torch.float64))
        (slope,) = torch.autograd.grad(loss, scalarizer.log_var)
        with torch.no_grad():
            scalarizer.log_var -= 0.1 * slope
        state, mix = method.mix(state, seen(*pair))


def test_famo_agrees_with_torchjd_over_a_resumed_run() -> None:
    scalarizer, state = torchjd_scalarization().FAMO(2).double(), {}
    for t, (before, after) in enumerate(itertools.pairwise(losses(41))):
        state = restored(state) if t == 20 else state
        torchjd_weights(scalarizer, before)
        scalarizer.update(torch.tensor(after, dtype=torch.float64))
        state, mix = famo_step(state, before, after)
        assert weights_of(mix) == pytest.approx(torchjd_weights(scalarizer, before), abs=1e-9)
