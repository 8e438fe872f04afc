"""The alarm: which losses raise it and clear it, and how methods respond."""

import dataclasses
import json
import math
import random
import re
import statistics

import pytest
import torch

from gac.control.alarm import Alarm, AlarmState, alarm_message, winsorized_mean
from gac.control.controller import ControllerConfig, GuidedController
from gac.control.gate import Gate
from gac.control.schedules import Prior
from gac.control.signals import Alignment
from gac.demo.task import write_rows
from gac.methods import METHODS, Observation
from gac.mixer import Mixer
from gac.training.trainer import Trainer
from gac_kernels import fused_gac_loss
from tests.control.streams import STREAMS, run
from tests.tiny import metrics, tiny_config, write_tiny

OPEN = {"prior": Prior.constant(0.6), "prior_blend": 0.0, "mu_min": 0.0, "mu_init": 0.6}
AGREE = Alignment(0.5, 0.01, 1.0, 1.0, 1.0, 1.0)  # gradients agree with cosine 0.5

MOMENTS = fused_gac_loss(
    torch.zeros(1, 3, 5), torch.tensor([[1, 2, 3]]), torch.zeros(1), torch.tensor([True]), mu=0.5
).moments


def changes(losses, **options) -> list[int]:
    """Steps at which the alarm is raised or cleared."""
    alarm, state, steps = Alarm(**options), None, []
    for step, loss in enumerate(losses):
        state, changed = alarm.update(state, loss)
        steps += [step] if changed else []
    return steps


def state_after(losses, **options) -> AlarmState:
    state = None
    for loss in losses:
        state, _ = Alarm(**options).update(state, loss)
    return state


def noisy(level: float, count: int, seed: int = 0, spread: float = 0.05) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(level, spread) for _ in range(count)]


def controller_with_alarm(**changes) -> GuidedController:
    gate = Gate("mean_cosine", decay=0.0)
    return GuidedController(ControllerConfig(**{"gate": gate, "alarm": Alarm(), **OPEN, **changes}))


@pytest.mark.parametrize("name", STREAMS)
def test_stream(name):
    """Means of five draws; research/alarm_streams.md has the worst of 200."""
    stream = STREAMS[name]
    results = [run(stream, seed) for seed in range(1000, 1005)]
    assert statistics.mean(r.wrong for r in results) <= stream.limit
    assert statistics.mean(r.delay or 0 for r in results) <= 2


def test_two_bad_batches_raise_the_alarm_and_two_good_ones_clear_it():
    good = noisy(0.4, 30, spread=0.02)
    assert changes(good + [3.0] * 10 + noisy(0.4, 9, spread=0.02)) == [31, 41]
    assert changes([*good, 3.0, *good, 3.0, *good]) == []
    assert changes(good + [3.0] * 200) == [31]
    # one good batch among the bad ones does not clear it
    assert changes([*good, 3.0, 3.0, 0.4, 3.0, 3.0, 3.0]) == [31]
    assert changes(noisy(3.0, 40, spread=0.3) + good) == []  # a fall raises no alarm


def test_small_changes_and_early_losses_are_ignored():
    # the first without noise, but within 2 typical errors
    assert changes([1.0] * 50 + [1.09] * 50) == []
    assert changes([1.0] * 50 + [1.3] * 50) == [51]
    assert changes([1.0] * 8 + [5.0] * 9) == []
    assert changes([1.0] * 10 + [5.0] * 9) == [11]
    assert changes([1.0] * 5 + [9.0] * 2, warmup=5) == [6]
    assert changes([1.0] * 50 + [9.0] * 2, threshold=5.1) == []
    assert changes([1.0] * 50 + [1.3] * 2, min_scale=0.1) == []  # 3 typical errors each


# typical errors of at least 1/8 of the level; the rates of the averages are 1/4 and 1/8
BY_HAND = Alarm(threshold=4, slack=1, clip=3, decay=0.75, warmup=4, min_scale=0.125, source_steps=6)
OFF = AlarmState(level=8, scale=2, num_losses=20, recent=7, shifted=99)
RISE = OFF._replace(level=12, scale=0.5, num_losses=10, cusum=3, extremes=1)
ON = AlarmState(8, 2, num_losses=3, recent=7, shifted=16, suspect=True, sources=(9.0, 8.0, 7.0))
RAISED = {"level": 7, "num_losses": 1, "cusum": 0, "extremes": 0, "suspect": True}
KNOWN = {"cusum": 0, "extremes": 0}
CLEARED = {"num_losses": 4, "cusum": 0, "shifted": 0, "suspect": False}


def off(**fields) -> AlarmState:
    return OFF._replace(**fields)


def rise(**fields) -> AlarmState:
    return RISE._replace(**fields)


def on(**fields) -> AlarmState:
    return ON._replace(**fields)


@pytest.mark.parametrize(
    ("before", "loss", "changes"),
    [
        (off(cusum=0.25), 9, {"level": 8.25, "scale": 1.925, "recent": 8, "cusum": 0}),
        (OFF, 12, {"level": 9, "scale": 2.45, "recent": 9.5, "cusum": 1}),
        (OFF, 6, {"level": 7.5, "scale": 1.925, "recent": 6.5}),
        (off(recent=4), 3, {"level": 6.75, "scale": 1.925, "recent": 3.5}),
        (OFF, -2, {"level": 6.5, "scale": 2.8, "recent": 2.5}),  # the error of -10 counts as -6
        # with a CUSUM above 1, rises are not yet noise
        (off(cusum=0.5), 12, {"level": 9, "recent": 9.5, "cusum": 1.5}),
        (off(cusum=3), 8.5, {"level": 8.125, "recent": 7.75, "cusum": 2.25}),
        (off(cusum=3), 8, {"scale": 1.75, "recent": 7.5, "cusum": 2}),
        (off(cusum=3), 7.5, {"level": 7.875, "scale": 1.8375, "recent": 7.25, "cusum": 1.75}),
        # warm-up
        (off(num_losses=2), 20, {"level": 12, "scale": 9.4, "recent": 13.5}),
        (off(num_losses=3, scale=0), 9, {"level": 8.25, "scale": 1.4 / 3, "recent": 8}),
        # extreme losses and their mean
        (OFF, 13, {"cusum": 1.5, "shifted": 13, "extremes": 1}),
        (off(num_losses=4), 30, {"cusum": 2, "shifted": 30, "extremes": 1}),
        (off(cusum=6), 30, {"cusum": 7, "shifted": 30, "extremes": 1}),
        (off(cusum=1.5, shifted=13, extremes=1), 17, {"cusum": 3.5, "shifted": 15, "extremes": 2}),
        (off(cusum=1, shifted=15, extremes=2), 18, {"cusum": 3, "shifted": 16, "extremes": 3}),
        (off(cusum=2, shifted=13, extremes=1), 17, {"cusum": 4, "shifted": 15, "extremes": 2}),
        # outliers are noise, which grows by 1 + (1.4 * 3 - 1) / 8 = 1.4 each, here squared
        (
            off(cusum=0.5, extremes=2, recent=6.4),
            7,
            {"level": 7.75, "scale": 3.535, "recent": 6.7, **KNOWN},
        ),
        (
            rise(num_losses=5, cusum=0.5),  # 1 + (1.4 * 3 - 1) / 5 = 1.64, then 4/5 of it
            12,
            {"scale": 1.5 * 1.64 * 0.8, "recent": 9.5, **KNOWN},
        ),
        # two of them raise the alarm; its reference is the lower of the two averages
        (off(cusum=2.5, shifted=13, extremes=1), 17, {**RAISED, "shifted": 15}),
        (rise(recent=13, shifted=22), 23.5, {**RAISED, "shifted": 22.75, "level": 12}),
        # after 4 + 6 losses, a rise to the level of another source raises none
        (
            rise(shifted=22, sources=(0.5, 1.25)),
            23,
            {"level": 22.5, "recent": 22.5, "shifted": 22.5, **KNOWN},
        ),
        (rise(shifted=22, sources=(0.5,)), 24, {**RAISED, "shifted": 23}),
        (rise(num_losses=9, shifted=22, sources=(0.5,)), 23, {**RAISED, "shifted": 22.5}),
        (
            rise(shifted=19, sources=(9.0, 1.25)),
            20,
            {"level": 27, "recent": 27, "shifted": 19.5, **KNOWN},
        ),
        (rise(shifted=18, sources=(9.0, 1.25)), 20, {**RAISED, "shifted": 19}),
        (
            rise(level=-12, shifted=-8, sources=(0.5,)),
            -6,
            {"level": -6, "recent": -6, "shifted": -7, **KNOWN},
        ),
        # during the alarm: distances below the midpoint of 12, in units of 4
        (ON, 10, {"cusum": 0.5}),
        (on(cusum=1.4), 20, {"cusum": 0.4}),
        (on(cusum=0.75), 20, {"cusum": 0}),
        (on(cusum=0.75), 9, {"cusum": 1.5}),
        (on(cusum=0.25, shifted=8), 30, {"cusum": 1.25}),
        (on(cusum=0.25), 5.6, {"cusum": 1.25}),  # a single loss adds at most 1
        (on(cusum=0.75), 6, {**CLEARED, "recent": 6}),
        (on(cusum=1.4, shifted=24), 14, {**CLEARED, "recent": 14}),
        (
            on(cusum=1.4, shifted=24),
            14.5,
            {**CLEARED, "num_losses": 1, "level": 14.5, "scale": 0, "recent": 14.5, "sources": ()},
        ),
        # a level that lasts for 6 losses is remembered
        (on(num_losses=5), 16, {}),
        (on(num_losses=6), 16, {"sources": (9, 8, 7, 1)}),
        (on(num_losses=6, level=0.5), 24, {"sources": (9, 8, 7, 31)}),
        (on(num_losses=6, level=0), 16, {"sources": (9, 8, 7, 1.6e13)}),
        (on(num_losses=6, level=-2, sources=(6.0, 5.0, 4.0, 3.0)), 16, {"sources": (5, 4, 3, 9)}),
    ],
)
def test_a_step_by_hand(before: AlarmState, loss: float, changes: dict) -> None:
    after, changed = BY_HAND.update(before, loss)
    expected = before._replace(**{"num_losses": before.num_losses + 1, **changes})
    assert changed == ("suspect" in changes)
    assert list(after[:-1]) == pytest.approx(list(expected[:-1]), rel=1e-12)
    assert after.sources == pytest.approx(expected.sources)


def test_sizes_are_relative_to_the_absolute_level():
    """A 3% rise from a level of -10 is small."""
    assert changes([-10.0] * 40 + [-9.7] * 40) == []
    assert changes([-10.0] * 40 + [-6.0] * 3) == [41]
    assert changes([0.0] * 40 + [1.0] * 3) == [41]


def test_the_reference_is_frozen_while_the_alarm_is_on():
    before = state_after([1.0] * 40)
    on = state_after([1.0] * 40 + [2.0] * 2 + [5.0] * 20)
    assert on.suspect
    assert (on.level, on.scale) == (before.level, before.scale)
    assert on.shifted == 2
    assert on.num_losses == 21
    off = state_after([1.0] * 40 + [2.0] * 20 + [1.0] * 2)
    assert not off.suspect
    assert off.level == before.level


def test_demonstrations_that_the_policy_learns_meanwhile_are_used_again():
    """Once half of the rise is gone, the reference restarts at that level, with a warm-up."""
    losses = [1.0] * 40 + [3.0] * 2 + [1.7] * 5
    assert changes([1.0] * 40 + [3.0] * 2 + [2.1] * 60) == [41]
    steps = changes(losses + [4.0] * 5)
    assert steps[0] == 41
    assert len(steps) == 2
    state = state_after(losses)
    assert not state.suspect
    assert state.level == pytest.approx(1.7)


def test_a_level_that_lasted_and_ended_is_another_source():
    first = [1.0] * 40 + [2.0] * 40 + [1.0] * 40
    assert changes(first + [2.0] * 40) == [41, 81]
    assert changes(first + [2.0] * 40, source_steps=0) == [41, 81, 121]
    assert changes(first + [2.0] * 40, source_steps=41) == [41, 81, 121]
    # it is the same level if the rise differs by at most half
    assert changes(first + [2.4] * 40) == changes(first + [1.6] * 40) == [41, 81]
    assert changes(first + [2.6] * 40) == [41, 81, 121]
    assert changes(first[:-25] + [2.0] * 40) == [41, 81, 96]  # the alarm had only been interrupted


def test_losses_of_demonstrations_outvote_outliers():
    assert winsorized_mean([5.0, 1.0, 2.0, 3.0, 90.0], 0.2) == pytest.approx(
        (2 + 2 + 3 + 5 + 5) / 5
    )
    assert winsorized_mean([1.0, 9.0], 0.4) == 5.0
    alarm, state = Alarm(), None
    for _ in range(20):
        state, _ = alarm.update(state, None, [0.9, 1.0, 1.0, 1.0, 1.1])
    for _ in range(9):  # one of five demonstrations is extreme
        state, changed = alarm.update(state, 20.0, [0.9, 1.0, 1.0, 99.0, 1.1])
        assert not changed
        assert not state.suspect
    for expected in (False, True):  # three of five have changed
        state, changed = alarm.update(state, 1.0, [0.9, 3.0, 3.0, 3.0, 1.1])
        assert changed == expected
    assert alarm.update(state, 1.0, [math.nan, math.inf])[0] != state  # the mean loss counts


def test_unknown_losses_leave_the_state_unchanged():
    alarm = Alarm()
    assert alarm.update(None, None) == alarm.update(None, math.nan) == (None, False)
    state, _ = alarm.update(None, 0.5)
    assert state == AlarmState(0.5, 0.0, 1, 0.5)
    for loss in (None, math.nan, math.inf):
        assert alarm.update(state, loss) == (state, False)


def test_a_rise_closes_the_gate_immediately_and_agreement_opens_it():
    controller = controller_with_alarm(max_step=0.1)
    for loss in noisy(0.4, 20):
        mu = controller.update(alignment=AGREE, demo_loss=loss)
    assert mu == 0.6
    assert controller.trust == 1.0
    controller.update(demo_loss=3.0)
    assert controller.update(demo_loss=3.0) == 0.0  # regardless of max_step
    assert controller.trust == 0.0
    assert controller.state.demos_suspect
    faint = AGREE._replace(inner=0.05)
    assert controller.update(alignment=faint, demo_loss=3.1) == pytest.approx(0.6 * 0.15)
    assert controller.update(alignment=faint._replace(inner=-0.01), demo_loss=3.0) == 0.0
    opening = [controller.update(alignment=AGREE, demo_loss=3.0) for _ in range(3)]
    assert opening == pytest.approx([0.1, 0.2, 0.3])  # reopening is limited by max_step


def test_a_falling_loss_clears_the_suspicion():
    controller = controller_with_alarm(max_step=1.0)
    for loss in [*noisy(0.4, 20), *noisy(3.0, 20)]:
        controller.update(demo_loss=loss)
    assert controller.state.demos_suspect
    assert controller.mu == 0.0
    assert controller.update(demo_loss=0.4) == 0.0
    # trust is 0.6 at mean cosine 0
    assert controller.update(demo_loss=0.4) == pytest.approx(0.6 * 0.6)
    assert not controller.state.demos_suspect


def test_suspect_demos_close_the_gate_before_the_first_measurement():
    controller = controller_with_alarm()
    for loss in [0.4] * 12:
        controller.update(demo_loss=loss, demo_losses=[loss])
    controller.update(demo_loss=0.4, demo_losses=[4.0])
    assert controller.update(demo_loss=0.4, demo_losses=[4.0]) == 0.0
    assert controller.state.gate is None
    assert controller.trust == 0.0


def test_state_round_trips_json():
    controller = controller_with_alarm()
    for loss in [*noisy(0.4, 15), 3.0, 3.1, 3.0]:
        controller.update(alignment=AGREE, demo_loss=loss)
    restored = controller_with_alarm()
    restored.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert restored.state == controller.state
    assert restored.state.demos_suspect
    for loss in (2.9, 0.4, 0.4):
        assert restored.update(demo_loss=loss) == controller.update(demo_loss=loss)
    state = controller.state.alarm._replace(sources=(0.5, 2.0), extremes=3)
    assert repr(AlarmState.of(json.loads(json.dumps(state.to_plain())))) == repr(state)
    for wrong, message in (
        ({**state.to_plain(), "new": 1.0}, "alarm=['new']: use a dict from to_plain()"),
        ({**state.to_plain(), "scale": "x"}, "alarm='x': use a finite number"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            AlarmState.of(wrong)


def test_messages_of_the_alarm() -> None:
    suspect, cleared = ON.to_plain(), OFF.to_plain()
    wrong = alarm_message(None, suspect)
    assert wrong.startswith("the demonstration loss jumped to 16: ")
    assert alarm_message(cleared, suspect) == wrong
    assert alarm_message(suspect, cleared).startswith("the demonstration loss fell to 8: ")
    for pair in ((suspect, None), (suspect, suspect), (None, cleared), (None, None)):
        assert alarm_message(*pair) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"slack": -1.0}, "slack=-1.0"),
        ({"clip": 1.5}, "clip=1.5: use a number > slack=1.5"),
        ({"min_scale": 0.0}, "min_scale=0.0"),
        ({"trim": 0.5}, "trim=0.5"),
        ({"source_steps": -1}, "source_steps=-1"),
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
    state = gate.update(gate.update(None, large), Alignment(-0.2, 1.0, -3.0, 1.0, 1.0, 1.0))
    assert state.cosine == pytest.approx(0.5 * 0.4 - 0.5 * 0.2)
    assert state.trust == pytest.approx(0.6 + 3.0 * 0.1)
    zero_gradient = Alignment(0.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    assert gate.update(state, zero_gradient).cosine == pytest.approx(0.05)
    assert gate.update(state, Alignment(0.1, 0.1, 1.0, 1.0)) == state


def test_run_detects_demonstrations_that_turn_bad(tmp_path, caplog):
    """The policy learns the first demonstrations; after 40 steps they are replaced by others."""
    task = write_tiny(tmp_path)
    examples = [json.loads(line) for line in (task / "demos.jsonl").read_text().splitlines()]
    sets = {"1.1.": 0, "-=+=": 40}
    rows = [{**row, "solution": x, "from_step": n} for x, n in sets.items() for row in examples]
    write_rows(task / "changing.jsonl", rows)
    data = {
        "prompts": str(task / "prompts.jsonl"),
        "demos": str(task / "changing.jsonl"),
        "order": "tests.changing:Phases",
    }
    method = {"name": "gac-gated", "alarm": {}, "gate": {"at_zero": 1.0, "slope": 0.0}}
    config = tiny_config(
        task,
        tmp_path / "run",
        method=method,
        data=data,
        steps=44,
        optim={"lr": 3e-3, "warmup_steps": 1},
    )
    Trainer(config).run()
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if row["demos_suspect"]] == [43, 44]
    assert rows[40]["demo_loss"] > 2 * rows[39]["demo_loss"]
    warnings = [line for line in caplog.messages if "demonstration loss jumped" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("step 43: ")
    # a step's mu depends on the previous step's loss
    assert rows[39]["mu"] > 0
    assert rows[42]["mu"] == 0.0


def test_guarded_needs_only_the_losses():
    method = METHODS["guarded"](mu=0.3)
    state, last = method.init(), Observation(0)
    mus = []
    losses = [*noisy(0.4, 15), 3.0, *noisy(3.0, 14, spread=0.2), None, 0.4, 0.4]
    for step, loss in enumerate(losses):
        state, mix = method.mix(json.loads(json.dumps(state)), last)
        mus.append(mix.mu)
        last = Observation(step + 1, demo_loss=loss)
    state, mix = method.mix(state, last)
    assert mus == [0.3] * 17 + [0.0] * 16
    assert mix.mu == 0.3
    assert method.report(state) == {"demos_suspect": 0.0}


def test_guarded_works_in_the_mixer(caplog):
    mixer = Mixer(METHODS["guarded"](), rows=8, batch=2)
    for loss in [0.4, 0.35] * 6 + [4.0] * 2:
        mixer.draw()
        mixer.weight_rollout_loss(torch.tensor(0.1))
        mixer.weight_demo_loss(torch.tensor(loss))
        nll = torch.full_like(MOMENTS.demo_nll, loss)
        mixer.observe(dataclasses.replace(MOMENTS, demo_nll=nll))
        row = mixer.close()
    assert row["mu"] == 0.4
    assert mixer.mu == 0.0
    (line,) = caplog.messages
    assert re.match("step 15: .* jumped to 4: .* use a method without an alarm", line)
    restored = Mixer(METHODS["guarded"](), rows=8, batch=2)
    restored.load_state_dict(json.loads(json.dumps(mixer.state_dict())))
    assert restored.mu == 0.0
