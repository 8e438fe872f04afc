"""The gate: measurements against direct computation, the trust, closing, reopening, resuming."""

import json
import math
from typing import Any

import pytest
import torch

from gac.control.controller import ControllerConfig, GuidedController
from gac.control.gate import Gate, GateState
from gac.control.schedules import Prior
from gac.control.signals import Alignment, alignment
from gac.methods import METHODS, Observation
from gac.step_end import next_mix
from gac.training.trainer import Trainer
from tests.tiny import metrics, tiny_config, write_tiny

CLOSED = {"z": -9.0, "cosine": -0.9}  # inner products that close the gate, with all other terms 1
CONSTANT = {"prior": Prior.constant(0.6), "prior_blend": 0.0, "max_step": 1.0, "mu_min": 0.0}


def gated_config(**changes) -> ControllerConfig:
    return ControllerConfig(**{"gate": Gate("z", decay=0.0), **CONSTANT, **changes})


def alignment_with(z: float, cosine: float = 0.0) -> Alignment:
    """The Alignment of one refresh with the given z and cosine."""
    return Alignment(z, 1.0, abs(z) / cosine if cosine else 0.0, abs(z * cosine), 1.0, 1.0)


@pytest.mark.parametrize(("s", "r"), [(4, 3), (2, 2)])
def test_alignment_equals_direct_computation(s: int, r: int) -> None:
    x, y = torch.randn(s, 7, dtype=torch.float64) + 1, torch.randn(r, 7, dtype=torch.float64)
    gradients = torch.cat([x, y])
    estimate = alignment(gradients @ gradients.T, s)
    cross = x @ y.T
    pairs = [
        cross[i, j] * cross[k, m]
        for i in range(s)
        for k in range(s)
        for j in range(r)
        for m in range(r)
        if i != k and j != m
    ]
    inner = x.mean(0).dot(y.mean(0)).item()
    assert estimate.inner == pytest.approx(inner, rel=1e-12)
    assert estimate.inner_variance == pytest.approx(inner**2 - sum(pairs).item() / len(pairs))
    noise = x.var(dim=0).sum().item() / s
    assert estimate.sft_square == pytest.approx(x.mean(0).dot(x.mean(0)).item() - noise)
    noise = y.var(dim=0).sum().item() / r
    assert estimate.rl_square == pytest.approx(y.mean(0).dot(y.mean(0)).item() - noise)
    assert estimate[4:] == pytest.approx(
        [z.mean(0).square().sum().item() for z in (x, y)], rel=1e-12
    )


@pytest.mark.parametrize(("s", "r"), [(1, 1), (1, 3), (3, 1)])
def test_one_micro_batch_gives_no_error_estimate(s: int, r: int) -> None:
    gradients = torch.randn(s + r, 6, dtype=torch.float64)
    unknown = [math.isnan(value) for value in alignment(gradients @ gradients.T, s)]
    assert unknown == [False, True, s == 1, r == 1, False, False]


def test_normalized_alignment_by_hand() -> None:
    measured = Alignment(0.1, 0.02, 3.0, 5.0, sft_total=0.25, rl_total=0.16)  # norms 0.5 and 0.4
    assert measured.normalized() == pytest.approx((0.5, 0.5, 1.0, 1.0, 1.0, 1.0))
    for total in (0.0, -0.1):
        for name in ("sft_total", "rl_total"):
            assert measured._replace(**{name: total}).normalized() == (0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
    # the product of the two totals is infinite
    assert Alignment(1e160, 1.0, 1.0, 1.0, 4e160, 1e160).normalized().inner == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("z", "trust"), [(3.0, 1.0), (0.0, 1.0), (-0.5, 0.75), (-1.0, 0.5), (-2.0, 0.0), (-9.0, 0.0)]
)
def test_z_form(z: float, trust: float) -> None:
    controller = GuidedController(gated_config())
    assert controller.update(alignment=alignment_with(z)) == pytest.approx(0.6 * trust, abs=1e-15)
    assert controller.trust == pytest.approx(trust, abs=1e-15)


@pytest.mark.parametrize(
    ("cosine", "trust"), [(0.5, 1.0), (0.2, 1.0), (0.1, 0.75), (0.0, 0.5), (-0.1, 0.25), (-0.9, 0)]
)
def test_cosine_form(cosine: float, trust: float) -> None:
    controller = GuidedController(gated_config(gate=Gate(form="cosine", decay=0.0)))
    measured = Alignment(cosine * 6.0, 1.0, 4.0, 9.0, 5.0, 9.5)
    assert controller.update(alignment=measured) == pytest.approx(0.6 * trust, abs=1e-12)
    # if noise hides a gradient, there is no cosine and half of the proposal is used
    for hidden in ("sft_square", "rl_square"):
        controller.update(alignment=measured._replace(**{hidden: -1.0}))
        assert controller.trust == 0.5


def test_the_averages_and_the_trust_line() -> None:
    gate = Gate("z", at_zero=0.8, slope=0.1, decay=0.75, hysteresis=0.1)
    state = gate.update(None, Alignment(-1.0, 4.0, 1.0, 1.0, 2.0, 2.0))
    assert state == GateState(-1.0, 4.0, 1.0, 1.0, 0.8)  # 0.75 is less than 0.1 away from 0.8
    state = gate.update(state, Alignment(-9.0, 8.0, 2.0, 3.0, 4.0, 4.0))
    assert state is not None
    assert state[:4] == (-3.0, 5.0, 1.25, 1.5)
    assert state.trust == pytest.approx(0.8 - 0.3 / math.sqrt(5))


@pytest.mark.parametrize(("z", "trust"), [(-2.0, 0.0), (0.5, 0.5), (2.0, 1.0)])
def test_trust_0_and_1_are_reached_despite_hysteresis(z: float, trust: float) -> None:
    after = Gate("z", at_zero=0.5, decay=0.0, hysteresis=1.0).update(None, alignment_with(z))
    assert after is not None
    assert after.trust == trust


def test_a_change_of_exactly_the_hysteresis_is_not_ignored() -> None:
    gate = Gate("z", at_zero=0.5, slope=0.25, hysteresis=0.25)
    assert gate.trust(gate.update(None, alignment_with(1.0))) == 0.75
    assert gate.trust(None) == 0.5
    assert gate.trust(None, demos_suspect=True) == 0.0


def test_measures_by_hand() -> None:
    def measures(*values: float) -> tuple[float, float]:
        state = GateState(*values, trust=0.5)
        return state.cosine, state.z

    assert measures(1.5, 0.25, 1.0, 9.0) == (0.5, 3.0)
    assert measures(6.0, 4.0, 1.0, 9.0) == (1.0, 3.0)
    assert measures(-6.0, 4.0, 1.0, 9.0) == (-1.0, -3.0)
    for unknown in (0.0, -0.5):
        assert measures(2.0, 4.0, unknown, 9.0) == measures(2.0, 4.0, 9.0, unknown) == (0.0, 1.0)
        assert math.isnan(measures(2.0, unknown, 1.0, 1.0)[1])


def test_reset_forgets_the_agreement_before_an_alarm() -> None:
    gate = Gate("z", decay=0.5)
    before = gate.update(None, alignment_with(3.0))
    after = gate.reset(before, demos_suspect=True)
    assert after is not None
    assert (after.inner, after.trust) == (0.0, 0.0)
    assert gate.update(after, alignment_with(0.5), True).inner == 0.25
    assert gate.reset(before, demos_suspect=False).trust == 1.0
    assert gate.reset(None, demos_suspect=True) is None


def test_a_first_reading_without_z_during_an_alarm_leaves_the_trust_at_0() -> None:
    during = Gate("z", decay=0.5).update(None, Alignment(0.2, -1.0, 1.0, 1.0, 1.0, 1.0), True)
    assert during is not None
    assert during.trust == 0.0


def test_unknown_measurements_change_nothing() -> None:
    controller = GuidedController(gated_config())
    assert controller.update() == 0.6
    assert controller.trust == 1.0
    controller.update(alignment=alignment_with(-1.0))
    before = controller.state.gate
    for name in Alignment._fields[:4]:
        controller.update(alignment=alignment_with(5.0)._replace(**{name: math.nan}))
        assert controller.state.gate == before


def test_without_a_positive_error_variance_only_the_averages_are_updated() -> None:
    controller = GuidedController(gated_config())
    controller.update(alignment=alignment_with(-1.0))
    controller.update(alignment=Alignment(8.0, -1.0, 0.0, 0.0, 1.0, 1.0))
    assert controller.trust == 0.5
    assert controller.state.gate.inner == 8.0


def test_every_proposal_is_gated_and_capped() -> None:
    for changes in (
        {"prior": Prior(high=0.9, low=0.1, hold=2, decay=4)},
        {"prior_blend": 1.0, "ema": "none"},
        {"prior_blend": 0.5},
    ):
        ungated = GuidedController(gated_config(**changes, gate=None))
        half = GuidedController(gated_config(**changes))
        for _ in range(6):
            assert half.update(alignment=alignment_with(-1.0)) == pytest.approx(
                0.5 * ungated.update()
            )
    slow = GuidedController(gated_config(max_step=0.1))
    assert slow.update(alignment=alignment_with(-9.0)) == pytest.approx(0.4)
    assert slow.update() == pytest.approx(0.3)


def test_the_literal_ema_rejects_a_gate() -> None:
    with pytest.raises(ValueError, match="ema='literal': use state or none"):
        ControllerConfig.paper(gate=Gate())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "sign"}, "form='sign': use one of cosine, mean_cosine, z"),
        ({"at_zero": 1.5}, "at_zero=1.5"),
        ({"slope": -1.0}, "slope=-1.0"),
        ({"decay": 1.0}, "decay=1.0"),
        ({"hysteresis": 2.0}, "hysteresis=2.0"),
    ],
)
def test_errors_name_field_and_value(changes, message) -> None:
    with pytest.raises(ValueError) as error:
        Gate(**changes)
    assert message in str(error.value)


def test_state_round_trips_json() -> None:
    controller = GuidedController(gated_config(gate=Gate("z")))
    for z in (1.0, -1.3, -0.7):
        controller.update(alignment=alignment_with(z, 0.3))
    restored = GuidedController(controller.config)
    restored.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert restored.state == controller.state
    assert restored.update(alignment=alignment_with(-2.0)) == controller.update(
        alignment=alignment_with(-2.0)
    )


def test_a_gate_needs_the_inner_product_of_the_gradients() -> None:
    with pytest.raises(ValueError, match="set method.signals=gradients"):
        METHODS["gac"](gate=Gate())


def likeness(completion: str, example: Any) -> float:
    """A reward for the format of demonstrations: digit, mark, digit, mark."""
    marks = (c in ".'" if i % 2 else c.isdigit() for i, c in enumerate(completion))
    return sum(marks) / 5


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("gac-gated", {"form": "z", "decay": 0.5}),
        ("gac-gated", {"form": "cosine", "decay": 0.5}),
    ],
)
def test_a_closed_gate_keeps_measuring_and_reopens(tmp_path, name, gate) -> None:
    """At mu = 0, demonstrations do not affect the update, but their gradient is still measured."""
    common = {
        "steps": 6,
        "seed": 2,  # the gate reopens within the steps
        "reward": "tests.control.test_gate:likeness",
        "rollouts": {"num_prompts": 8, "num_generations": 4, "max_completion_length": 5},
    }
    task = write_tiny(tmp_path, layers=2)
    method = {"name": name, "max_step": 1.0, "gate": gate}
    closed = CLOSED[gate["form"]]
    gated_run = Trainer(tiny_config(task, tmp_path / "gated", method=method, **common))
    state = gated_run.method.init()
    state["controller"]["gate"] = [closed, 1.0, 1.0, 1.0, 0.0]
    gated_run.state, gated_run.mix = next_mix(gated_run.method, state, Observation(0))
    gated_run.run()
    rows = metrics(tmp_path / "gated")
    assert rows[0]["mu"] == 0.0
    Trainer(tiny_config(task, tmp_path / "grpo", method={"name": "grpo"}, **common)).run()
    grpo = metrics(tmp_path / "grpo")
    assert rows[0]["grad_norm"] == pytest.approx(grpo[0]["grad_norm"], rel=1e-4)
    assert rows[1]["z"] != closed
    assert rows[-1]["mu"] > 0
    for row in rows:
        assert row["mu"] == pytest.approx(0.7 * row["trust"], abs=1e-12)
