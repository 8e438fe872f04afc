"""What a run saves, restores and checks at its start, with fake parts, by hand."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gac.config import dump, load
from gac.errors import ConfigError
from gac.methods.base import Mix, StepNeeds
from gac.rollouts.plan import Sampling, Stage
from gac.training import run, trainer
from gac.training.run import Run
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer


@pytest.mark.parametrize(
    ("step", "checkpoints"),
    [(0, 3), (1, 3), (3, 3), (4, 2), (9, 1), (10, 0)],
)
def test_the_space_that_a_run_needs(monkeypatch, tmp_path, step, checkpoints) -> None:
    """For the checkpoints of 10 steps at 3, 6, 9 and 10, at most 3 at once."""
    checked, truncated, opened = [], [], []
    accelerator = SimpleNamespace(
        is_main_process=step > 0, init_trackers=lambda name, config: opened.append((name, config))
    )
    trackers = ["tensorboard"] if step == 4 else []
    config = load(
        TrainConfig, {"checkpoint_every": 3, "keep_checkpoints": 2, "report_to": trackers}
    )
    fake = SimpleNamespace(
        config=config,
        step=0,
        feed=SimpleNamespace(steps=10),
        out=tmp_path / "run",
        checkpoints=tmp_path / "run" / "checkpoints",
        model="model",
        accelerator=accelerator,
        record=SimpleNamespace(truncate=truncated.append),
        _restore=lambda path: setattr(fake, "step", int(path)),
    )
    monkeypatch.setattr(run.preflight, "check_space", lambda *a: checked.append(a))
    for _ in range(2):  # once more in an existing folder
        Run._open(fake, str(step) if step else None)
    assert checked == [(fake.out, "model", checkpoints)] * 2
    assert truncated == [step or None] * 2
    assert fake.checkpoints.is_dir() == (step > 0) == (fake.out / "config.yaml").exists()
    if step:
        assert load(TrainConfig, fake.out / "config.yaml") == config
    settings = {"config": str(dump(config))}
    assert opened == [("run", settings)] * (2 if trackers else 0)


def test_a_checkpoint_holds_the_state_of_the_run(monkeypatch) -> None:
    saved: list = []
    steps = SimpleNamespace(
        save=lambda *a: saved.append(a), prune=lambda *a: saved.append(a), read_progress=None
    )
    monkeypatch.setattr(run, "checkpoint", steps)
    config = load(TrainConfig, {"steps": 9, "keep_checkpoints": 3})
    fake = SimpleNamespace(
        state={"a": 1},
        mix=Mix(0.3, 2.0, True),
        ended=True,
        feed=SimpleNamespace(state_dict=lambda: {"order": 5}),
        guard=SimpleNamespace(state_dict=lambda: {"skipped": 2}),
        best={"step": 4, "accuracy": 0.5},
        fingerprint={"data": "x"},
        config=config,
        accelerator=SimpleNamespace(num_processes=3),
        checkpoints="folder",
        step=6,
        model="model",
        optimizer="optimizer",
        gradients=SimpleNamespace(tracked="tracked"),
    )
    Run.save(fake)
    progress = {
        "method": {"a": 1},
        "mix": [0.3, 2.0, True],
        "ended": True,
        "order": 5,
        "guard": {"skipped": 2},
        "best": {"step": 4, "accuracy": 0.5},
        "fingerprint": {"data": "x"},
        "config": dump(config),
        "ranks": 3,
        "format": run.preflight.FORMAT,
    }
    assert saved == [
        ("folder", 6, "model", "optimizer", progress, "tracked"),
        ("folder", 3, 4),
    ]
    fake.best = {}
    Run.save(fake)
    assert saved[-1] == ("folder", 3, None)
    # the other direction
    restored: list = []
    steps.read_progress = lambda path: progress
    steps.load = lambda *a: restored.append(a) or {**progress, "step": 6}
    new = SimpleNamespace(
        config=config,
        fingerprint={"data": "x"},
        model="new model",
        optimizer="new optimizer",
        gradients=SimpleNamespace(tracked="new tracked"),
        guard=SimpleNamespace(load_state_dict=restored.append),
        feed=SimpleNamespace(load_state_dict=restored.append),
    )
    Run._restore(new, "path")
    assert restored[:2] == [("path", "new model", "new optimizer", "new tracked"), {"skipped": 2}]
    assert restored[2]["order"] == 5
    assert (new.step, new.state, new.mix, new.ended) == (6, {"a": 1}, Mix(0.3, 2.0, True), True)
    assert new.best == {"step": 4, "accuracy": 0.5}
    new.fingerprint = {"data": "y"}
    with pytest.raises(ConfigError, match="the data changed"):
        Run._restore(new, "path")


@pytest.mark.parametrize("resize", [True, False])
@pytest.mark.parametrize(
    ("own", "saved", "used"),
    [
        ({}, {"max_tokens_per_micro_batch": 96}, (None, 96)),
        ({}, {"micro_batch_size": 3}, (3, None)),
        ({}, {}, (None, None)),
        ({"micro_batch_size": 5}, {"max_tokens_per_micro_batch": 96}, (5, None)),
        ({"max_tokens_per_micro_batch": 64}, {"micro_batch_size": 3}, (None, 64)),
    ],
)
def test_a_resumed_run_keeps_its_micro_batches(monkeypatch, resize, own, saved, used) -> None:
    checked: list = []
    config = load(TrainConfig, {"steps": 9, "parallel": {"allow_world_size_change": resize}, **own})
    progress = {"config": dump(load(TrainConfig, {"steps": 8, **saved})), "ranks": 3}
    fake = SimpleNamespace(config=config, out=Path("out"), checkpoints=Path("out/checkpoints"))
    monkeypatch.setattr(run.preflight, "check_folder", lambda out: checked.append(out))
    monkeypatch.setattr(run.preflight, "check_same_run", lambda *a: checked.append(a))
    steps = SimpleNamespace(
        newest=lambda folder: folder / "newest", read_progress=lambda path: progress
    )
    monkeypatch.setattr(run, "checkpoint", steps)
    path = Path("out/checkpoints/newest")
    assert Run._find_checkpoint(fake, True) == path
    assert checked == [Path("out"), (progress, dump(config), resize)]
    assert (
        fake.config.micro_batch_size,
        fake.config.max_tokens_per_micro_batch,
        fake.config.steps,
    ) == (
        *used,
        9,
    )
    with pytest.raises(ValueError, match="out='out' already holds a run: resume it, or"):
        Run._find_checkpoint(fake, False)
    steps.newest, fake.config = lambda folder: None, config
    assert Run._find_checkpoint(fake, False) is Run._find_checkpoint(fake, True) is None
    assert fake.config is config


@pytest.mark.parametrize(
    ("completions", "stages", "demo_in_group", "rollouts", "valid"),
    [
        (2, (), False, True, True),
        (1, (), False, True, False),
        (1, (), True, True, True),
        (1, (), False, False, True),
        (8, (1,), False, True, False),
        (1, (1, 1), False, True, True),
    ],
)
def test_advantages_need_two_rewards(completions, stages, demo_in_group, rollouts, valid) -> None:
    plan = Sampling(stages=tuple(map(Stage, stages)), demo_in_group=demo_in_group)
    method = SimpleNamespace(
        sampling=lambda n: plan if n == completions else None,
        needs=lambda step: StepNeeds(rollouts=rollouts),
    )
    config = SimpleNamespace(method=method, rollouts=SimpleNamespace(num_generations=completions))
    message = f"rollouts.num_generations={completions}: advantages compare .* use a number >= 2"
    with contextlib.nullcontext() if valid else pytest.raises(ValueError, match=message):
        TrainConfig._check_groups(config)


def test_settings_at_the_edge_of_their_range() -> None:
    assert load(TrainConfig, {"loss": {"clip_low": 1}}).loss.clip_low == 1
    assert load(TrainConfig, {"loss": {"clip_low": None}}).loss.clip_low is None
    for changes, message in (
        ({"loss": {"clip_low": 1.01}}, r"loss.clip_low=1.01: use a number in \[0, 1\]"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16': use one of no, bf16"),
        (
            {"rollouts": {"engine": "paged"}, "parallel": {"mode": "fsdp"}},
            "rollouts.engine='paged' needs the full model on each rank: use parallel.mode=ddp",
        ),
        ({"optim": {"schedule": "step"}}, "schedule='step': use one of cosine, linear, constant"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(TrainConfig, changes)


@pytest.mark.parametrize("error", [None, KeyError("a bug")])
def test_a_run_is_locked_and_leaves_its_process_group(monkeypatch, error) -> None:
    events: list = []

    @contextlib.contextmanager
    def lock(folder: Path):
        events.append(("lock", folder))
        yield
        events.append("unlock")

    def make(*arguments: Any) -> Any:
        events.append(arguments)
        return SimpleNamespace(run=lambda: "out")

    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(trainer, "run_lock", lock)
    monkeypatch.setattr(trainer, "Trainer", fail if error else make)
    monkeypatch.setattr(trainer.setup, "leave", lambda: events.append("leave"))
    config = load(TrainConfig, {"out": "runs/a"})
    if error:
        with pytest.raises(KeyError):
            trainer.train(config)
        assert events == [("lock", Path("runs/a")), "leave"]
    else:
        for arguments in ((config,), (config, False)):
            assert trainer.train(*arguments) == "out"
            resume = len(arguments) == 1
            expected = [("lock", Path("runs/a")), (config, resume), "unlock", "leave"]
            assert events == expected
            events.clear()


@pytest.mark.parametrize("results", [{"accuracy": 0.5, "a": 1}, {"length": 7}, None])
def test_an_evaluation_of_the_gathered_model(monkeypatch, results) -> None:
    events: list = []

    @contextlib.contextmanager
    def gathered(model: str, parallel: str):
        events.append((model, parallel))
        yield
        events.append("done")

    class Evaluator:
        def __bool__(self) -> bool:
            return results is not None

        def __call__(self, policy: str) -> dict[str, float]:
            events.append(policy)
            return results

    monkeypatch.setattr(trainer.setup, "gathered", gathered)
    fake = SimpleNamespace(
        evaluator=Evaluator(),
        heartbeat=SimpleNamespace(activity=""),
        step=4,
        model="model",
        policy="policy",
        config=SimpleNamespace(parallel="parallel"),
        record=SimpleNamespace(evaluation=events.append),
    )
    assert Trainer._evaluate(fake) == (results or {}).get("accuracy")
    if results is None:
        assert events == []
    else:
        assert events == [("model", "parallel"), "policy", "done", {"step": 4, **results}]
        assert fake.heartbeat.activity == "step 4, evaluation"
