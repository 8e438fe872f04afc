"""The alarm: which losses count as a jump, and how the controller responds."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from gac.config import dump
from gac.control.alarm import Alarm, AlarmState
from gac.control.alignment import Alignment
from gac.control.controller import ControllerConfig, GuidedController
from gac.control.gate import Gate
from gac.control.schedules import Prior
from gac.integrations.mixer import Mixer
from gac.methods import METHODS, Observation
from gac.training.run_config import TrainConfig, restated
from gac.training.trainer import Trainer
from gac_kernels import fused_gac_loss

from .tiny import metrics, tiny_config, write_tiny

OPEN = {"prior": Prior.constant(0.6), "prior_blend": 0.0, "mu_min": 0.0, "mu_init": 0.6}
AGREE = Alignment(0.5, 0.01, 1.0, 1.0, 1.0, 1.0)  # gradients agree with cosine 0.5

MOMENTS = fused_gac_loss(
    torch.zeros(1, 3, 5), torch.tensor([[1, 2, 3]]), torch.zeros(1), torch.tensor([True]), mu=0.5
).moments


def jumps(losses, **options) -> list[int]:
    alarm, state, found = Alarm(**options), None, []
    for step, loss in enumerate(losses):
        state, jumped = alarm.next(state, loss)
        found += [step] if jumped else []
    return found


def noisy(level: float, count: int, seed: int = 0, spread: float = 0.05) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(level, spread) for _ in range(count)]


def alarmed(**changes) -> GuidedController:
    gate = Gate("mean_cosine", decay=0.0)
    return GuidedController(ControllerConfig(**{"gate": gate, "alarm": Alarm(), **OPEN, **changes}))


def test_a_jump_is_found_at_its_step_and_once():
    assert jumps(noisy(0.4, 40) + noisy(3.0, 40, spread=0.3)) == [40]
    assert jumps(noisy(3.0, 40, spread=0.3) + noisy(0.4, 40)) == [40]
    assert jumps(noisy(0.4, 30) + noisy(3.0, 30, spread=0.2) + noisy(0.4, 30)) == [30, 60]


def test_noise_falls_and_drifts_are_hardly_ever_a_jump():
    """The loss decay of a first epoch and a slow drift, 200 runs of 300 steps each."""
    found = 0
    for seed in range(200):
        noise = noisy(0.0, 300, seed)
        found += len(jumps([3 * math.exp(-t / 20) + 0.4 + e for t, e in enumerate(noise)]))
        found += len(jumps([0.5 + 0.002 * t + e for t, e in enumerate(noise)]))
    assert found <= 1


def test_small_changes_and_the_first_losses_are_no_jump():
    assert jumps([1.0] * 50 + [1.09] * 50) == []  # no noise, but below the 10 % minimum
    assert jumps([1.0] * 50 + [1.2] * 50) == [50]
    assert jumps([1.0] * 9 + [5.0] * 9) == [] and jumps([1.0] * 10 + [5.0] * 9) == [10]
    assert jumps([1.0] * 5 + [9.0], warmup=5, threshold=1e9) == [
        5
    ]  # all forecast errors so far are 0


def test_what_is_not_known_changes_nothing():
    alarm = Alarm()
    assert alarm.next(None, None) == (None, False) and alarm.next(None, math.nan) == (None, False)
    state, _ = alarm.next(None, 0.5)
    for loss in (None, math.nan, math.inf):
        assert alarm.next(state, loss) == (state, False)


def test_a_rise_shuts_the_gate_at_once_and_agreement_opens_it():
    controller = alarmed(max_step=0.1)
    for loss in noisy(0.4, 20):
        mu = controller.update(alignment=AGREE, demo_loss=loss)
    assert mu == 0.6 and controller.trust == 1.0
    assert controller.update(demo_loss=3.0) == 0.0  # regardless of max_step
    assert controller.trust == 0.0 and controller.state.doubted
    faint = AGREE._replace(inner=0.05)
    assert controller.update(alignment=faint, demo_loss=3.1) == pytest.approx(0.6 * 0.15)
    assert controller.update(alignment=faint._replace(inner=-0.01), demo_loss=3.0) == 0.0
    opening = [controller.update(alignment=AGREE, demo_loss=3.0) for _ in range(3)]
    assert opening == pytest.approx([0.1, 0.2, 0.3])  # reopening is limited by max_step


def test_a_fall_lifts_the_doubt():
    controller = alarmed(max_step=1.0)
    for loss in [*noisy(0.4, 20), *noisy(3.0, 20)]:
        controller.update(demo_loss=loss)
    assert controller.state.doubted and controller.mu == 0.0
    assert controller.update(demo_loss=0.4) == pytest.approx(
        0.6 * 0.6
    )  # trust is 0.6 at mean cosine 0
    assert not controller.state.doubted


def test_before_the_first_measurement_a_doubt_is_a_shut_gate():
    controller = alarmed()
    for loss in [0.4] * 12:
        controller.update(demo_loss=loss)
    assert controller.update(demo_loss=4.0) == 0.0 and controller.state.gate is None


def test_the_state_survives_json_and_states_without_an_alarm_are_read():
    controller = alarmed()
    for loss in [*noisy(0.4, 15), 3.0, 3.1]:
        controller.update(alignment=AGREE, demo_loss=loss)
    again = alarmed()
    again.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert again.state == controller.state and again.state.doubted
    for loss in (2.9, 0.4):
        assert again.update(demo_loss=loss) == controller.update(demo_loss=loss)
    plain = controller.state_dict()
    del plain["alarm"]
    again.load_state_dict(plain)
    assert again.state.alarm is None
    with pytest.raises(ValueError, match="alarm"):
        AlarmState.of([1.0, 2.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"decay": 1.0}, "decay=1.0"),
        ({"warmup": 1}, "warmup=1"),
        ({"threshold": math.nan}, "threshold=nan"),
    ],
)
def test_errors_name_field_and_value(changes, message):
    with pytest.raises(ValueError) as error:
        Alarm(**changes)
    assert message in str(error.value)


def test_an_alarm_without_a_gate_is_refused():
    with pytest.raises(ValueError, match="alarm=Alarm.*null, or a gate beside it"):
        ControllerConfig(alarm=Alarm())


def test_the_mean_cosine_ignores_sizes_and_noise():
    """Measurements of very different magnitude have equal weight; a zero gradient counts as cosine
    0.
    """
    gate = Gate("mean_cosine", decay=0.5)
    large, small = (
        Alignment(40.0, 1.0, 90.0, 90.0, 100.0, 100.0),
        Alignment(-0.2, 1.0, -3.0, 1.0, 1.0, 1.0),
    )
    state = gate.next(gate.next(None, large), small)
    assert state.cosine == pytest.approx(0.5 * 0.4 - 0.5 * 0.2)
    assert state.trust == pytest.approx(0.6 + 3.0 * 0.1)
    nothing = Alignment(0.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    assert gate.next(state, nothing).cosine == pytest.approx(0.05)
    assert gate.next(state, Alignment(0.1, 0.1, 1.0, 1.0)) == state  # the total squares are unknown


def test_a_run_notices_demonstrations_that_turn_bad(tmp_path, caplog):
    """The policy learns the first demonstrations; after 40 steps they are replaced by others."""
    task = write_tiny(tmp_path)
    rows = [json.loads(line) for line in (task / "demos.jsonl").read_text().splitlines()]
    easy = [{**row, "solution": "1.1."} for row in rows]
    for name, demos in (("easy", easy), ("hard", [{**r, "solution": "-=+="} for r in rows])):
        (task / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demos))
    data = {
        "prompts": str(task / "prompts.jsonl"),
        "demos": str(task / "easy.jsonl"),
        "demo_shifts": [{"step": 40, "demos": str(task / "hard.jsonl")}],
    }
    method = {"name": "gac-gated", "alarm": {}, "gate": {"at_zero": 1.0, "slope": 0.0}}
    config = tiny_config(
        task, tmp_path / "run", method=method, data=data, steps=44, optim={"lr": 3e-3, "warmup": 1}
    )
    Trainer(config).run()
    found = metrics(tmp_path / "run")
    assert [row["step"] for row in found if row["doubted"]] == [42, 43, 44]
    assert found[40]["demo_loss"] > 2 * found[39]["demo_loss"]
    heard = [line for line in caplog.messages if "presumed wrong" in line]
    assert len(heard) == 1 and heard[0].startswith("step 42: ")
    assert (
        found[39]["mu"] > 0 and found[41]["mu"] == 0.0
    )  # a step's mu depends on the previous step's loss


def test_the_guarded_constant_needs_nothing_but_the_losses():
    method = METHODS["guarded"](mu=0.3)
    state, last = method.init(), Observation(0)
    found = []
    for step, loss in enumerate([*noisy(0.4, 15), 3.0, *noisy(3.0, 14, spread=0.2), None, 0.4]):
        state, mix = method.mix(json.loads(json.dumps(state)), last)
        found.append(mix.mu)
        last = Observation(step + 1, demo_loss=loss)
    state, mix = method.mix(state, last)
    assert found == [0.3] * 16 + [0.0] * 16 and mix.mu == 0.3
    assert method.report(state) == {"doubted": 0.0}


def test_another_trainer_can_be_guarded(caplog):
    mixer = Mixer(METHODS["guarded"](), rows=8, batch=2)
    for loss in [0.4, 0.35] * 6 + [4.0]:
        mixer.draw()
        mixer.rollouts(torch.tensor(0.1))
        mixer.demos(torch.tensor(loss))
        mixer.observe(MOMENTS)
        row = mixer.close()
    assert row["mu"] == 0.4 and mixer.mu == 0.0
    (line,) = caplog.messages
    assert line.startswith("step 14: the demonstrations' loss jumped to 4: they are presumed wrong")
    again = Mixer(METHODS["guarded"](), rows=8, batch=2)
    again.load_state_dict(json.loads(json.dumps(mixer.state_dict())))
    assert again.mu == 0.0


def test_a_run_from_before_the_alarm_goes_on_without_one():
    plain = dump(TrainConfig())
    assert restated(plain) == plain and plain["method"]["alarm"] is not None
    del plain["method"]["alarm"]
    assert restated(plain)["method"]["alarm"] is None
