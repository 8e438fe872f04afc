"""The alarm: which losses count as a jump, and how the controller responds."""

from __future__ import annotations

import json
import math
import random
import re

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
from gac.training.run_config import TrainConfig, upgrade_config
from gac.training.trainer import Trainer
from gac_kernels import fused_gac_loss

from .tiny import metrics, tiny_config, write_tiny

OPEN = {"prior": Prior.constant(0.6), "prior_blend": 0.0, "mu_min": 0.0, "mu_init": 0.6}
AGREE = Alignment(0.5, 0.01, 1.0, 1.0, 1.0, 1.0)  # gradients agree with cosine 0.5

MOMENTS = fused_gac_loss(
    torch.zeros(1, 3, 5), torch.tensor([[1, 2, 3]]), torch.zeros(1), torch.tensor([True]), mu=0.5
).moments


def jump_steps(losses, **options) -> list[int]:
    alarm, state, steps = Alarm(**options), None, []
    for step, loss in enumerate(losses):
        state, jumped = alarm.update(state, loss)
        steps += [step] if jumped else []
    return steps


def noisy(level: float, count: int, seed: int = 0, spread: float = 0.05) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(level, spread) for _ in range(count)]


def controller_with_alarm(**changes) -> GuidedController:
    gate = Gate("mean_cosine", decay=0.0)
    return GuidedController(ControllerConfig(**{"gate": gate, "alarm": Alarm(), **OPEN, **changes}))


def test_a_jump_is_detected_once_at_its_step():
    assert jump_steps(noisy(0.4, 40) + noisy(3.0, 40, spread=0.3)) == [40]
    assert jump_steps(noisy(3.0, 40, spread=0.3) + noisy(0.4, 40)) == [40]
    assert jump_steps(noisy(0.4, 30) + noisy(3.0, 30, spread=0.2) + noisy(0.4, 30)) == [30, 60]


def test_noise_decay_and_drift_rarely_trigger_the_alarm():
    """A decaying loss, as in a first epoch, and a slow drift: 200 runs of 300 steps each."""
    count = 0
    for seed in range(200):
        noise = noisy(0.0, 300, seed)
        count += len(jump_steps([3 * math.exp(-t / 20) + 0.4 + e for t, e in enumerate(noise)]))
        count += len(jump_steps([0.5 + 0.002 * t + e for t, e in enumerate(noise)]))
    assert count <= 1


def test_small_changes_and_early_losses_are_ignored():
    assert jump_steps([1.0] * 50 + [1.09] * 50) == []  # no noise, but below the 10 % minimum
    assert jump_steps([1.0] * 50 + [1.2] * 50) == [50]
    assert jump_steps([1.0] * 9 + [5.0] * 9) == [] and jump_steps([1.0] * 10 + [5.0] * 9) == [10]
    # all forecast errors so far are 0
    assert jump_steps([1.0] * 5 + [9.0], warmup=5, threshold=1e9) == [5]


def test_unknown_losses_leave_the_state_unchanged():
    alarm = Alarm()
    assert alarm.update(None, None) == alarm.update(None, math.nan) == (None, False)
    state, _ = alarm.update(None, 0.5)
    for loss in (None, math.nan, math.inf):
        assert alarm.update(state, loss) == (state, False)


def test_a_rise_closes_the_gate_immediately_and_agreement_opens_it():
    controller = controller_with_alarm(max_step=0.1)
    for loss in noisy(0.4, 20):
        mu = controller.update(alignment=AGREE, demo_loss=loss)
    assert mu == 0.6 and controller.trust == 1.0
    assert controller.update(demo_loss=3.0) == 0.0  # regardless of max_step
    assert controller.trust == 0.0 and controller.state.demos_suspect
    faint = AGREE._replace(inner=0.05)
    assert controller.update(alignment=faint, demo_loss=3.1) == pytest.approx(0.6 * 0.15)
    assert controller.update(alignment=faint._replace(inner=-0.01), demo_loss=3.0) == 0.0
    opening = [controller.update(alignment=AGREE, demo_loss=3.0) for _ in range(3)]
    assert opening == pytest.approx([0.1, 0.2, 0.3])  # reopening is limited by max_step


def test_a_falling_loss_clears_the_suspicion():
    controller = controller_with_alarm(max_step=1.0)
    for loss in [*noisy(0.4, 20), *noisy(3.0, 20)]:
        controller.update(demo_loss=loss)
    assert controller.state.demos_suspect and controller.mu == 0.0
    # trust is 0.6 at mean cosine 0
    assert controller.update(demo_loss=0.4) == pytest.approx(0.6 * 0.6)
    assert not controller.state.demos_suspect


def test_suspect_demos_close_the_gate_before_the_first_measurement():
    controller = controller_with_alarm()
    for loss in [0.4] * 12:
        controller.update(demo_loss=loss)
    assert controller.update(demo_loss=4.0) == 0.0 and controller.state.gate is None


def test_state_round_trips_json_and_older_states_load():
    controller = controller_with_alarm()
    for loss in [*noisy(0.4, 15), 3.0, 3.1]:
        controller.update(alignment=AGREE, demo_loss=loss)
    restored = controller_with_alarm()
    restored.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert restored.state == controller.state and restored.state.demos_suspect
    for loss in (2.9, 0.4):
        assert restored.update(demo_loss=loss) == controller.update(demo_loss=loss)
    plain = controller.state_dict()
    del plain["alarm"]
    restored.load_state_dict(plain)
    assert restored.state.alarm is None
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


def test_an_alarm_without_a_gate_is_rejected():
    with pytest.raises(ValueError, match=r"alarm=Alarm\(.*null.*gate"):
        ControllerConfig(alarm=Alarm())


def test_the_mean_cosine_ignores_sizes_and_noise():
    """Large and small measurements have equal weight; a zero gradient counts as cosine 0."""
    gate = Gate("mean_cosine", decay=0.5)
    large = Alignment(40.0, 1.0, 90.0, 90.0, 100.0, 100.0)
    small = Alignment(-0.2, 1.0, -3.0, 1.0, 1.0, 1.0)
    state = gate.update(gate.update(None, large), small)
    assert state.cosine == pytest.approx(0.5 * 0.4 - 0.5 * 0.2)
    assert state.trust == pytest.approx(0.6 + 3.0 * 0.1)
    zero_gradient = Alignment(0.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    assert gate.update(state, zero_gradient).cosine == pytest.approx(0.05)
    unknown_totals = Alignment(0.1, 0.1, 1.0, 1.0)
    assert gate.update(state, unknown_totals) == state


def test_run_detects_demonstrations_that_turn_bad(tmp_path, caplog):
    """The policy learns the first demonstrations; after 40 steps they are replaced by others."""
    task = write_tiny(tmp_path)
    examples = [json.loads(line) for line in (task / "demos.jsonl").read_text().splitlines()]
    for name, solution in (("easy", "1.1."), ("hard", "-=+=")):
        lines = [json.dumps({**row, "solution": solution}) + "\n" for row in examples]
        (task / f"{name}.jsonl").write_text("".join(lines))
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
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if row["demos_suspect"]] == [42, 43, 44]
    assert rows[40]["demo_loss"] > 2 * rows[39]["demo_loss"]
    warnings = [line for line in caplog.messages if "demonstration loss jumped" in line]
    assert len(warnings) == 1 and warnings[0].startswith("step 42: ")
    # a step's mu depends on the previous step's loss
    assert rows[39]["mu"] > 0 and rows[41]["mu"] == 0.0


def test_guarded_needs_only_the_losses():
    method = METHODS["guarded"](mu=0.3)
    state, last = method.init(), Observation(0)
    mus = []
    for step, loss in enumerate([*noisy(0.4, 15), 3.0, *noisy(3.0, 14, spread=0.2), None, 0.4]):
        state, mix = method.mix(json.loads(json.dumps(state)), last)
        mus.append(mix.mu)
        last = Observation(step + 1, demo_loss=loss)
    state, mix = method.mix(state, last)
    assert mus == [0.3] * 16 + [0.0] * 16 and mix.mu == 0.3
    assert method.report(state) == {"demos_suspect": 0.0}


def test_guarded_works_in_the_mixer(caplog):
    mixer = Mixer(METHODS["guarded"](), rows=8, batch=2)
    for loss in [0.4, 0.35] * 6 + [4.0]:
        mixer.draw()
        mixer.weight_rollout_loss(torch.tensor(0.1))
        mixer.weight_demo_loss(torch.tensor(loss))
        mixer.observe(MOMENTS)
        row = mixer.close()
    assert row["mu"] == 0.4 and mixer.mu == 0.0
    (line,) = caplog.messages
    assert re.match("step 14: .* jumped to 4: .* use a method without an alarm", line)
    restored = Mixer(METHODS["guarded"](), rows=8, batch=2)
    restored.load_state_dict(json.loads(json.dumps(mixer.state_dict())))
    assert restored.mu == 0.0


def test_older_configs_load_with_the_alarm_off():
    plain = dump(TrainConfig())
    assert upgrade_config(plain) == plain and plain["method"]["alarm"] is not None
    del plain["method"]["alarm"]
    assert upgrade_config(plain)["method"]["alarm"] is None
