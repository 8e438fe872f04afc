"""What a run saves, restores and checks at its start, with fake parts, by hand."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gac.config import dump, load
from gac.errors import ConfigError
from gac.methods import METHODS, Observation
from gac.methods.base import Mix, StepNeeds
from gac.rollouts.generation import RolloutConfig
from gac.rollouts.plan import Sampling, Stage
from gac.training import run, trainer
from gac.training.run import Run
from gac.training.run_config import TrainConfig, upgrade_config
from gac.training.trainer import Trainer
from gac_kernels import LossSpec


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
        ({}, {}, (sys.maxsize, None)),
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


def test_the_parts_of_a_run(monkeypatch) -> None:
    """Each part is built from the run's settings and the parts before it."""
    settings = {
        "out": "runs/a",
        "model": {"path": "the-model"},
        "seed": 17,
        "steps": 3,
        "report_to": ["wandb"],
        "mixed_precision": "bf16",
        "reward_noise": {"rate": 0.5},
        "rollouts": {"max_completion_length": 7, "num_generations": 5, "stop": ["a"]},
        "eval": {"stop": ["b"]},
        "method": {"name": "constant", "mu": 0.3},
    }
    given, resumed, chosen = (
        load(TrainConfig, {**settings, "micro_batch_size": n}) for n in (1, 2, 3)
    )
    chosen = replace(chosen, micro_batch_size=None, max_tokens_per_micro_batch=64)
    parts: dict[str, tuple] = {}

    def part(name: str, result: Any = None) -> None:
        def build(*arguments: Any, **keywords: Any) -> Any:
            parts[name] = (*arguments, keywords) if keywords else arguments
            return name if result is None else result

        owner = run.setup if name == "make_accelerator" else run
        monkeypatch.setattr(owner, name, build)

    accelerator = SimpleNamespace(
        process_index=2, num_processes=4, unwrap_model=lambda model: ("unwrapped", model)
    )
    plan = given.method.sampling(5)
    feed = SimpleNamespace(
        check_budgets=lambda config: 11 if config is resumed else None,
        longest_row=lambda response: response + 100,
        unit=6,
        more_examples="more",
        sources=lambda: "sources",
        names_sources=False,
    )
    part("make_accelerator", accelerator)
    part("Feed", feed)
    part("build_rewards", ("eval reward", "reward"))
    part("choose_micro_batches", chosen)
    part("next_mix", ("state", "mix"))
    names = [
        "Heartbeat",
        "Record",
        "load_tokenizer",
        "stop_tokens",
        "make_engine",
        "load_policy",
        "load_reference",
        "make_optimizer",
        "make_gradients",
        "Sampler",
        "Tally",
        "Evaluator",
        "fingerprint",
        "StopRequest",
        "Guard",
    ]
    for name in names:
        part(name)

    def find(self: Run, resume: bool) -> str:
        assert self.config is given and resume == "resume"
        self.config = resumed
        return "checkpoint"

    monkeypatch.setattr(Run, "_find_checkpoint", find)
    monkeypatch.setattr(Run, "_open", lambda self, path: parts.update(opened=(path, self.step)))
    made = Run(given, "resume")
    needs = StepNeeds.union(map(made.needs, range(3)))
    assert parts == {
        "make_accelerator": (given.parallel, "bf16", ("wandb",), "runs/a"),
        "Heartbeat": (),
        "Record": (Path("runs/a"), accelerator),
        "load_tokenizer": (resumed.model,),
        "stop_tokens": ("load_tokenizer", ("a", "b")),
        "Feed": (resumed, "load_tokenizer", 2, 4),
        "make_engine": (
            resumed.rollouts,
            "load_tokenizer",
            {"served": "the-model", "longest": 11, "folder": Path("runs/a")},
        ),
        "load_policy": (resumed, accelerator),
        "load_reference": (resumed, accelerator, needs.kl),
        "choose_micro_batches": (resumed, accelerator, "load_policy", "load_reference", 107, 6),
        "make_optimizer": ("load_policy", chosen.optim),
        "make_gradients": (
            chosen,
            accelerator,
            "load_tokenizer",
            "load_policy",
            "load_reference",
            needs,
        ),
        "build_rewards": ("math", chosen.reward_noise, 17, 2),
        "Sampler": (
            chosen.rollouts,
            "make_engine",
            "load_tokenizer",
            "reward",
            plan,
            given.method.credit,
            "more",
        ),
        "Tally": ("reward",),
        "Evaluator": (chosen.eval, "load_tokenizer", "eval reward", 17),
        "next_mix": (given.method, given.method.init(), Observation(0)),
        "Guard": (chosen.guards,),
        "StopRequest": (),
        "fingerprint": (chosen.model, "load_tokenizer", "sources", "eval reward"),
        "opened": ("checkpoint", 0),
    }
    assert not made.kl_in_loss and not needs.kl
    assert made.checkpoints == Path("runs/a/checkpoints") and feed.sized_in_tokens is True
    assert (made.policy, made.plan) == (("unwrapped", "load_policy"), plan)
    assert (made.config, made.state, made.mix, made.step) == (chosen, "state", "mix", 0)
    assert (made.rollouts, made.ended, made.best, made.first_skipped) == (None, False, {}, None)
    chosen = replace(chosen, max_tokens_per_micro_batch=None)
    part("choose_micro_batches", chosen)
    resumed = replace(resumed, method=METHODS["sft"](), loss=LossSpec(kl_coef=0.1))
    given = replace(given, method=resumed.method)
    feed.check_budgets = lambda config: 0
    assert Run(given, "resume").kl_in_loss and not feed.sized_in_tokens
    assert parts["make_engine"][0] == RolloutConfig()  # no server is contacted


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


def test_configurations_of_earlier_versions() -> None:
    """Gates had no alarm; alarms without `slack` had another threshold."""
    gated, guarded = ({"method": {"name": name}} for name in ("gac-gated", "guarded"))
    for current in (gated, guarded, {"method": "grpo"}, {}):
        plain = dump(load(TrainConfig, current))
        assert upgrade_config(plain) == plain
    method = dump(load(TrainConfig, gated))["method"]
    assert method["alarm"] is not None
    older = {key: value for key, value in method.items() if key != "alarm"}
    assert upgrade_config({"method": older})["method"] == {**method, "alarm": None}
    settings = {"decay": 0.8, "threshold": 5.0, "warmup": 7}
    for alarm, threshold in ((settings, None), ({**settings, "slack": 0.25}, 5.0)):
        new = upgrade_config({"method": {"name": "guarded", "alarm": alarm}})["method"]["alarm"]
        default = dump(load(TrainConfig, guarded))["method"]["alarm"]
        changes = {key: alarm[key] for key in alarm if key != "threshold"}
        changes |= {"threshold": threshold} if threshold else {}
        assert new == {**default, **changes}
    for unknown in ({"steps": 3, "removed": 1}, {"method": {"name": "removed"}}):
        assert upgrade_config(unknown) == unknown


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
