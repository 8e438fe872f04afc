"""The training loop with fake parts, against values computed by hand."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from tqdm.auto import tqdm

from gac.config import load
from gac.control.term_pair import TermPair
from gac.data.rows import Counts, Row
from gac.errors import RunError
from gac.faults.guard import Guard, GuardConfig
from gac.methods.base import Mix, StepNeeds
from gac.parallel import collectives
from gac.rollouts.sampling import Rollouts, SamplingStats
from gac.training import trainer
from gac.train_config import TrainConfig
from gac.training.skipped import SkippedStep
from gac.training.step import Measured, Rewards, Step, Update
from gac.training.trainer import Trainer
from gac_kernels import TokenMoments

MAIN = SimpleNamespace(is_main_process=True, num_processes=3, process_index=2, trackers=[])
STEP = Step(
    6, (), Mix(0.3, 2.0), Counts(1, 2, 1, 2, 2, 6), Rewards(0, 0, 0), StepNeeds(), (), seed=1
)
ROWS = [Row((i, 1), 1, False, 1.0, i) for i in range(3)]


# ---- one step


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))


def apply(monkeypatch, *, parts: bool, gram: float = 1.0, fault: str | None = None) -> Any:
    """Apply a step with the gradient (6, 8), a clip of 5 and a learning rate of 0.1 x 3 / 4."""
    model, events = Weights(), []
    model.used.grad = torch.tensor([6.0, 8.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    config = {"optim": {"lr": 0.1, "warmup_steps": 8, "max_grad_norm": 5}}
    fake = SimpleNamespace(
        state={"old": 1},
        model=model,
        optimizer=optimizer,
        config=load(TrainConfig, config),
        feed=SimpleNamespace(steps=20),
        gradients=SimpleNamespace(tracked={"a": 1, "b": 2}),
        guard=SimpleNamespace(judge=lambda *arguments: events.append(arguments) or fault),
        _save_skipped=events.append,
        method=SimpleNamespace(solve=lambda *a: events.append(a) or ({"new": 2}, (0.5, 1.5))),
    )
    monkeypatch.setattr(trainer.setup, "reshard", lambda m: events.append("reshard"))
    separate = SimpleNamespace(
        averages={"b": 3},
        combine_pair=lambda *a: events.append(("combine", *a)) or Mix(0.25, 2.0),
    )
    matrix = torch.full((2, 2), gram)
    measured = Measured(
        TermPair(demo=1.0, rollout=2.0),
        TokenMoments.zeros(),
        parts=separate if parts else None,
        gram=matrix if parts else None,
    )
    update = Trainer._apply(fake, STEP, measured)
    return fake, events, update, matrix, measured.losses


@pytest.mark.parametrize("fault", [None, "a fault"])
@pytest.mark.parametrize("parts", [True, False])
def test_an_update_is_applied_or_skipped(monkeypatch, parts: bool, fault: str | None) -> None:
    fake, events, update, gram, losses = apply(monkeypatch, parts=parts, fault=fault)
    norm, lr = 10.0, 0.1 * 7 / 8
    assert update == Update(Mix(0.25, 2.0) if parts else STEP.mix, norm, pytest.approx(lr), fault)
    if parts:
        state, matrix, mix = events.pop(0)
        assert (state, mix) == ({"old": 1}, STEP.mix) and matrix is gram
        assert events.pop(0) == ("combine", (0.5, 1.5), STEP.mix)
    expected = ["reshard", (norm, {"rollout_loss": 2.0, "demo_loss": 1.0})]
    if fault:
        weights = TermPair(demo=0.5, rollout=1.5) if parts else None
        expected.append(SkippedStep(STEP, weights, "a fault", norm, losses))
    assert events == expected
    applied, model = fault is None, fake.model
    assert fake.state == ({"new": 2} if parts and applied else {"old": 1})
    assert fake.gradients.tracked == {"a": 1, "b": 3 if parts and applied else 2}
    step = torch.tensor([-0.6, -0.8]) * 5 * lr * applied
    torch.testing.assert_close(model.used.detach(), step, rtol=1e-5, atol=0)
    assert model.used.grad is None


def test_a_gram_matrix_that_is_not_finite_is_not_solved(monkeypatch) -> None:
    fake, events, update, _, losses = apply(
        monkeypatch, parts=True, gram=math.nan, fault="grad_norm is nan"
    )
    assert events[:2] == [("combine", None, STEP.mix), "reshard"] and update.norm == 10.0
    assert events[3] == SkippedStep(STEP, None, "grad_norm is nan", 10.0, losses)
    assert fake.state == {"old": 1}


@pytest.mark.parametrize("gram", [torch.ones(1), torch.full((1,), math.nan), None])
def test_the_norm_without_a_gradient(monkeypatch, gram) -> None:
    """nan if the parts were not finite and nothing was combined; 0 if no row has a gradient."""
    norms: list = []
    fake: Any = SimpleNamespace(
        state={},
        model=Weights(),
        config=load(TrainConfig, {}),
        feed=SimpleNamespace(steps=20),
        gradients=SimpleNamespace(tracked={}),
        guard=SimpleNamespace(judge=lambda norm, losses: norms.append(norm)),
        method=SimpleNamespace(solve=lambda *a: ({}, (0.5, 0.5))),
    )
    fake.optimizer = torch.optim.SGD(fake.model.parameters(), lr=1.0)
    fake.optimizer.step = lambda: pytest.fail("there is no gradient")
    parts = SimpleNamespace(averages={}, combine_pair=lambda weights, mix: mix)
    measured = Measured(TermPair(1.0, 2.0), TokenMoments.zeros(), gram=gram, parts=parts)
    Trainer._apply(fake, STEP, measured)
    assert norms == [0.0] if gram is None or gram.isfinite() else math.isnan(norms[0])


@pytest.mark.parametrize("number", [6, 7])
@pytest.mark.parametrize("fault", [None, "a fault"])
@pytest.mark.parametrize("after", [True, False])
def test_what_a_step_reports(monkeypatch, number, fault, after) -> None:
    """Statistics of the sampling only in the first of two steps that use the rollouts."""
    seen: list = []
    step = Step(**{**vars(STEP), "number": number, "needs": StepNeeds(losses_after=after)})
    rollouts = Rollouts(ROWS, [1.0], SamplingStats(responses=7, tokens=21), {"a": (3.0, 4)})
    fake = SimpleNamespace(
        rollouts=rollouts,
        config=load(TrainConfig, {"rollouts": {"num_iterations": 2}}),
        gradients=SimpleNamespace(losses=lambda own: ("after", own.number)),
        guard=SimpleNamespace(skipped=5),
        tally=SimpleNamespace(new_counts=lambda: {"calls": 8}),
        method=SimpleNamespace(report=lambda state: {"alpha": state}),
        state=0.5,
    )
    monkeypatch.setattr(
        trainer, "observe", lambda *a: seen.append(a) or ({"alpha": None, "kl": 1}, "observation")
    )
    update = Update(STEP.mix, 1.0, 0.1, fault)
    row, observation = Trainer._observe(fake, step, "measured", update)
    losses = ("after", number) if after and fault is None else None
    assert seen == [(step, "measured", update, losses)] and observation == "observation"
    fresh = number == 6
    stats = rollouts.stats if fresh else SamplingStats()
    means = {"reward_mean/a": 0.75} if fresh else {}
    other = {"alpha": 0.5, "kl": 1, "skipped": 5, "calls": 8}
    assert row == {**stats.columns(), **means, **other}
    fake.rollouts = None
    row, _ = Trainer._observe(fake, step, "measured", update)
    assert row == {**SamplingStats().columns(), **other}


@pytest.mark.parametrize("main", [True, False])
def test_which_skipped_steps_are_saved(main: bool, caplog) -> None:
    """At most four; consecutive ones share the weights of the first."""
    firsts: list = []
    fake = SimpleNamespace(
        guard=Guard(GuardConfig(max_saved_steps=4, patience=9)),
        config=load(TrainConfig, {"guards": {"max_saved_steps": 4}}),
        first_skipped=None,
        out=Path("run"),
        model="model",
        gradients=SimpleNamespace(tracked="tracked"),
        accelerator=SimpleNamespace(is_main_process=main),
    )
    for number, norm in enumerate((math.nan, math.inf, math.nan, 1.0, math.nan, math.nan)):
        fault = fake.guard.judge(norm, {})
        if fault is None:
            continue

        def save(*arguments: Any, path: str = f"path-{number}") -> str:
            assert arguments[:3] == (Path("run/replay"), "model", "tracked")
            firsts.append(arguments[3])
            return path

        step = Step(**{**vars(STEP), "number": number})
        Trainer._save_skipped(fake, SimpleNamespace(save=save, step=step, fault=fault))
    assert firsts == [None, "path-0", "path-0", None] and fake.guard.kept == 4
    saved = [(0, "nan"), (1, "inf"), (2, "nan"), (4, "nan")]
    expected = [f"skipped step {n}: grad_norm is {x} (gac replay path-{n})" for n, x in saved]
    expected.append("skipped step 5: grad_norm is nan (not saved)")
    assert caplog.messages == (expected if main else [])


@pytest.mark.parametrize("step", [4, 5, 7])
def test_the_rows_of_a_step(monkeypatch, step: int) -> None:
    """Rollouts in all steps but 7; collected demonstrations where rollouts are new."""
    seeds: list = []
    monkeypatch.setattr(trainer.setup, "seed", seeds.append)
    rollouts = Rollouts(ROWS[:1], [], SamplingStats(), {})
    rollouts.collected = ["collected"]
    fake = SimpleNamespace(
        step=step,
        _seed=17,
        rollouts="earlier",
        config=load(TrainConfig, {"rollouts": {"num_iterations": 2}}),
        needs=lambda t: StepNeeds(rollouts=t != 7),
        _roll_out=lambda: rollouts,
        feed=SimpleNamespace(
            demo_rows=lambda t: [ROWS[1]] if t == step else None,
            collected_rows=lambda own: [ROWS[2]] if own == ["collected"] else None,
        ),
    )
    rows = Trainer._sample(fake)
    assert rows == {4: ROWS, 5: ROWS[:2], 7: ROWS[1:2]}[step] and seeds == [17]
    assert fake.rollouts is (None if step == 7 else rollouts) and rollouts.rows == ROWS[:1]


@pytest.mark.parametrize(
    ("reuse", "needs_after", "initial", "teacher"),
    [
        (1, False, False, False),
        (2, False, False, False),
        (1, True, False, True),
        (2, True, True, False),
    ],
)
def test_new_rollouts(monkeypatch, reuse, needs_after, initial, teacher) -> None:
    """From the policy or the reference; with log-probs only if a later loss needs the ratio."""
    events: list = []

    @contextlib.contextmanager
    def gathered(model, parallel):
        events.append(("gathered", model, parallel))
        yield
        events.append("done")

    monkeypatch.setattr(trainer.setup, "gathered", gathered)
    config = load(TrainConfig, {"rollouts": {"num_iterations": reuse}})

    def sample(model, examples, step):
        events.append((model, examples, step))
        return Rollouts([], [], SamplingStats(), {})

    fake = SimpleNamespace(
        step=6,
        model="model",
        policy="unwrapped",
        rollouts="earlier",
        config=config,
        plan=SimpleNamespace(from_reference=initial, teacher=teacher),
        needs=lambda t: StepNeeds(losses_after=needs_after and t == 6),
        feed=SimpleNamespace(examples=lambda t: f"examples {t}", balance=lambda rows: ROWS),
        heartbeat=SimpleNamespace(activity=""),
        sampler=sample,
        gradients=SimpleNamespace(
            forward=SimpleNamespace(
                reference_model=lambda: contextlib.nullcontext("reference"),
                row_logprobs=lambda rows: ["old", *rows],
                teacher_logprobs=lambda rows: ["teacher", *rows],
            )
        ),
    )
    rollouts = Trainer._roll_out(fake)
    model = "reference" if initial else "model"
    sampled = "reference" if initial else "unwrapped", "examples 6", 6
    assert events == [("gathered", model, config.parallel), sampled, "done"]
    assert rollouts.rows == ROWS and fake.heartbeat.activity == "step 6, rollouts"
    measured = (reuse > 1 or needs_after) and not initial
    assert list(rollouts.old_logps) == (["old", *ROWS] if measured else [])
    assert list(rollouts.teacher_logps) == (["teacher", *ROWS] if teacher else [])
    fake.step = 7
    assert (Trainer._roll_out(fake) == "earlier") == (reuse == 2)
    fake.rollouts = None  # after a restart
    assert Trainer._roll_out(fake).rows == ROWS


def test_a_step_has_the_counts_and_rewards_of_all_ranks(monkeypatch) -> None:
    monkeypatch.setattr(collectives, "total", lambda values: [10 * value for value in values])
    rollouts = Rollouts([], [0.5, 2.0], SamplingStats(), {})
    rollouts.old_logps, rollouts.teacher_logps = ["old"], ["teacher"]
    config = load(TrainConfig, {"seed": 3})
    fake = SimpleNamespace(step=6, rollouts=rollouts, config=config, accelerator=MAIN)
    fake.needs, fake.heartbeat = lambda t: StepNeeds(trim=t / 100), SimpleNamespace(activity="")
    fake._seed = Trainer._seed.fget(fake)
    assert fake._seed == trainer._derive_seed(3, 6, 2)
    rows = [Row((1, 2, 3), 1, False), Row((4, 5), 1, True), Row((1,) * 5, 1, True)]
    step = Trainer._assemble(fake, rows, Mix(0.3))
    assert step == Step(
        6,
        tuple(rows),
        Mix(0.3),
        Counts(10, 20, 20, 50, 30, 100),
        Rewards(20, 25, 42.5),
        StepNeeds(trim=0.06),
        ("old",),
        fake._seed + 1,
        trainer._derive_seed(3, 6, "sketch"),
        ("teacher",),
    )
    assert fake.heartbeat.activity == "step 6, gradients"
    fake.rollouts = None
    step = Trainer._assemble(fake, rows, Mix(0.3))
    assert (step.rewards, step.old_logps, step.teacher_logps) == (Rewards(0, 0, 0), (), ())


def test_a_step_uses_the_mix_that_was_chosen_before(monkeypatch) -> None:
    """The last step's own mix ends the run, not the next one."""
    results = {"_sample": "rows", "_assemble": "step", "_apply": "update"}
    events: list = []
    fake = SimpleNamespace(method="method", mix=Mix(0.3, final=False), state="before")

    def part(name: str, result: Any) -> Any:
        return lambda *arguments: events.append((name, *arguments)) or result

    for name, result in results.items():
        setattr(fake, name, part(name, result))
    fake.gradients, fake._observe = part("gradients", "measured"), part("observe", ("row", "seen"))
    following = "after", Mix(0.4, final=True)
    monkeypatch.setattr(trainer, "next_mix", part("next", following))
    assert Trainer._train_step(fake) == "row"
    assert events == [
        ("_sample",),
        ("_assemble", "rows", Mix(0.3)),
        ("gradients", "step"),
        ("_apply", "step", "measured"),
        ("observe", "step", "measured", "update"),
        ("next", "method", "before", "seen"),
    ]
    assert not fake.ended and (fake.state, fake.mix) == following
    Trainer._train_step(fake)
    assert fake.ended


# ---- the loop


def loop(
    *, start: int = 0, exhausted_at: int = 99, sample_every: int = 3, rollouts: bool = True
) -> list:
    """The actions of a run of 4 steps."""
    events: list = []
    keys = ("step", "seconds", "sampling_share")
    fake = SimpleNamespace(
        step=start,
        rollouts=rollouts,
        config=load(TrainConfig, {"rollouts": {"log_samples_every": sample_every}}),
        sampler=SimpleNamespace(samples="samples"),
        guard=SimpleNamespace(exhausted=False),
        record=SimpleNamespace(
            step=lambda row: events.append(("row", *(row[key] for key in keys))),
            samples=lambda step, samples, config: events.append((samples, step)),
        ),
        _evaluate=lambda: events.append("evaluate"),
        _checkpoint=lambda: events.append(("checkpoint", fake.step)),
        _done=lambda: fake.step >= 4,
    )

    def train_step() -> dict[str, Any]:
        fake.guard.exhausted = fake.step + 1 == exhausted_at
        never = dict.fromkeys(("mu", "reward_mean", "kl", "entropy"))
        return {"step": fake.step + 1, "sampling_seconds": 1.0, **never}

    def abort() -> None:
        raise RunError("abort")

    fake._train_step, fake._abort = train_step, abort
    with tqdm(total=4, file=io.StringIO()) as bar, pytest.MonkeyPatch.context() as patch:
        # a step takes 4 seconds
        patch.setattr(trainer, "time", SimpleNamespace(perf_counter=itertools.count(9, 4).__next__))
        with contextlib.suppress(RunError):
            Trainer._loop(fake, bar)
        assert bar.n == sum(event[0] == "row" for event in events)
    return events


def test_the_actions_of_a_run() -> None:
    def steps(*numbers: int, samples: tuple[int, ...]) -> list:
        events = []
        for n in numbers:
            events += [("row", n, 4, 0.25), *[("samples", n)] * (n in samples), ("checkpoint", n)]
        return events

    assert loop() == ["evaluate", *steps(1, 2, 3, 4, samples=(1, 4))]
    assert loop(rollouts=False) == ["evaluate", *steps(1, 2, 3, 4, samples=())]
    assert loop(start=2) == steps(3, 4, samples=(4,))
    assert loop(sample_every=0) == ["evaluate", *steps(1, 2, 3, 4, samples=(1, 2, 3, 4))]
    assert loop(exhausted_at=2) == ["evaluate", *steps(1, samples=(1,)), ("row", 2, 4, 0.25)]


@pytest.mark.parametrize("dead", [None, "rank 1 is not responding"])
@pytest.mark.parametrize("error", [RunError("mine"), RuntimeError("gloo"), ValueError("bug")])
def test_an_error_of_a_dead_rank_names_it(monkeypatch, dead, error) -> None:
    fake = runnable(monkeypatch, [])
    fake.heartbeat.dead_rank_message = lambda: dead

    def fail(bar: tqdm) -> None:
        raise error

    fake._loop = fail
    with pytest.raises(type(error)) as caught:
        Trainer.run(fake)
    if dead and str(error) == "gloo":
        assert isinstance(caught.value, RunError) and caught.value.__cause__ is error
        assert str(caught.value) == f"{dead}; restart the job to resume from checkpoints"
    else:
        assert caught.value is error


def runnable(monkeypatch, events: list, **changes: Any) -> Any:
    """A run of 9 steps, of which 2 are done."""

    @contextlib.contextmanager
    def within(name: str):
        events.append(name)
        yield
        events.append(f"{name} done")

    monkeypatch.setattr(trainer, "closing_reward", within)
    monkeypatch.setattr(trainer, "export_checkpoint", lambda *a: events.append(("export", *a)))
    finish = SimpleNamespace(finish=lambda: events.append("tracker"))
    config = load(
        TrainConfig, {"run_name": changes.get("name"), "export": changes.get("export", True)}
    )

    def run_loop(bar: tqdm) -> None:
        events.append(bar.disable or (bar.total, bar.n, bar.desc))
        if not bar.disable:  # the system clock may jump
            assert bar._time is time.monotonic and bar.dynamic_ncols
            assert bar.start_t == bar.last_print_t <= time.monotonic()

    return SimpleNamespace(
        step=2,
        config=config,
        method=SimpleNamespace(name="the-method"),
        feed=SimpleNamespace(steps=9),
        accelerator=SimpleNamespace(is_main_process=changes.get("main", True), trackers=[finish]),
        stop=within("signals"),
        tally=SimpleNamespace(reward="reward"),
        evaluator=SimpleNamespace(close=lambda: events.append("close")),
        heartbeat=SimpleNamespace(stop=lambda: events.append("stop")),
        checkpoints="checkpoints",
        out=Path("out"),
        _exported_checkpoint=lambda: "its checkpoint",
        _loop=run_loop,
    )


@pytest.mark.parametrize(
    ("changes", "exported"),
    [({}, True), ({"name": "mine"}, True), ({"export": False}, False), ({"main": False}, False)],
)
def test_a_run_from_its_start_to_its_export(monkeypatch, changes, exported) -> None:
    events: list = []
    fake = runnable(monkeypatch, events, **changes)
    assert Trainer.run(fake) == Path("out")
    shown = (9, 2, changes.get("name", "the-method")) if "main" not in changes else True
    export = ("export", fake.config.model, "its checkpoint", Path("out/model"))
    closed = ["close", "reward done", "signals done"]
    assert events == ["signals", "reward", shown, *closed, "stop", *[export] * exported, "tracker"]
