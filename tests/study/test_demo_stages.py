"""The demo's stages and settings, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gac.config import ConfigError, dump
from gac.demo import run
from gac.demo.settings import demo_fields
from gac.errors import RunError
from gac.methods import METHODS
from gac.report.reading import flatten
from gac.train_config import TrainConfig

DEFAULTS = dict(flatten(dump(TrainConfig())))


def differing(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if v != DEFAULTS.get(k, ...)}


def changed(config: TrainConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, by dotted key, without the method's."""
    settings = dict(flatten(dump(config)))
    return differing({k: v for k, v in settings.items() if not k.startswith("method.")})


SHARED = {
    "reward": "gac.demo.task:reward",
    "rollouts.num_prompts": 12,
    "rollouts.num_generations": 8,
    "rollouts.max_completion_length": 9,
    "data.demo_field": "solution",
    "eval.data.prompts": "o/task/eval.jsonl",
    "eval.max_completion_length": 9,
    "eval.batch": None,
    "eval.split_field": "op",
    "micro_batch_size": 1000,
    "optim.betas": [0.9, 0.99],
    "optim.warmup_steps": 10,
}


def test_settings_of_the_stages() -> None:
    base = run.base_config(Path("o"), Path("o/base-3"), 3, 50, "sparse")
    assert changed(base) == differing(
        SHARED
        | {
            "out": "o/base-3",
            "run_name": "base",
            "model.path": "o/task/init",
            "model.random_init": True,
            "data.demos": "o/task/sparse.jsonl",
            "optim.lr": 3e-3,
            "optim.min_lr_ratio": 0.0,
            "steps": 50,
            "demo_batch_size": 64,
            "seed": 3,
            "checkpoint_every": 100,
            "eval.samples": 4,
            "eval.temperature": 1.0,
        }
    )
    assert dump(base)["method"] == dump(TrainConfig(method=METHODS["sft"]()))["method"]
    assert changed(run.base_config(Path("o"), Path("x"), 0, 9))["data.demos"] == "o/task/base.jsonl"
    trained = SHARED | {
        "model.path": "b",
        "optim.lr": 2e-4,
        "steps": 80,
        "seed": 2,
        "demo_batch_size": 32,
        "eval.every": 20,
        "checkpoint_every": 20,
        "monitor_kl_every": 10,
        "export": False,
    }
    separate = {"data.prompts": "o/task/prompts.jsonl", "data.demos": "o/task/demos.jsonl"}
    for name, data in (
        ("gac", separate),
        ("grpo", separate),
        ("luffy", {"data.prompts": "o/task/prompts_demos.jsonl"}),
    ):
        config = run.method_config(Path("o"), Path("b"), name, 2, 80)
        assert changed(config) == differing(trained | data | {"out": f"o/{name}-2"})
        assert config.method == METHODS[name](**dict(vars(config.method)))
    method: Any = run.method_config(Path("o"), Path("b"), "gac", 2, 80).method
    prior = method.prior
    assert (prior.high, prior.low, prior.hold, prior.decay) == (0.85, 0.15, 4, 80)


def test_durations_are_scaled_to_the_steps() -> None:
    prior = {"prior": {"high": 0.85, "low": 0.15, "hold": 8, "decay": 160}}
    decaying = {"schedule": {"peak": 0.9, "valley": 0.05, "decay": 96}}
    wcf = {"peak": 0.5, "valley": 0.02, "warmup": 40, "decay": 80}
    expected: dict[str, Any] = {
        "sft-light": {"examples": 128, "epochs": 5},
        "sft-best": {"epochs": 20},
        "sft-then-rl": {"sft_steps": 80},
        "hpcd": decaying,
        "chord-mu": decaying,
        "chord": decaying,
        "wcf": {"schedule": wcf},
        "kl-ctrl": {"calibration": 20},
        "rewvar-ctrl": {"calibration": 20},
        "amft": {"warmup": 10},
        "uft": {"hint_steps": 96},
        "prefix-rft": {"low": {"peak": 0.95, "valley": 0.05, "decay": 160}},
        "dwa": {"window": 10},
        "gac": prior,
        "gac-paper": prior,
        "gac-gated": {},
        "gac-gated-sketch": {},
        "constant": {},
        "guarded": {},
    }
    assert {name: demo_fields(name, 160) for name in expected} == expected
    assert demo_fields("dwa", 5) == {"window": 1} and demo_fields("kl-ctrl", 7) == {
        "calibration": 1
    }


def fake_training(monkeypatch: Any, accuracies: dict[str, float]) -> list[Any]:
    """Replace training; `accuracies`: of subtraction, by the name of the run's folder."""
    calls: list[Any] = []

    def run_all(configs: list[TrainConfig], jobs: int, report: bool) -> dict[str, str]:
        calls.append(([config.out for config in configs], jobs, report))
        for config in configs:
            out = Path(config.out)
            out.mkdir(parents=True, exist_ok=True)
            minus = accuracies.get(out.name, 0.0)
            rows = [
                {"accuracy/+": 0.5, "accuracy/-": 0.05},
                {"accuracy/+": 0.5, "accuracy/-": minus},
            ]
            (out / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {c.out: "failed: x" for c in configs if c.out.endswith("dft-1")}

    monkeypatch.setattr(run, "run_all", run_all)
    return calls


def test_seeds_of_the_base_model_are_tried_until_one_is_accepted(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    accuracies = {"base-0": 0.009, "base-1": 0.101, "base-2": 0.1, "few-3": 0.2, "base-4": 0.01}
    calls = fake_training(monkeypatch, accuracies)
    assert run.make_base(tmp_path, 9) == tmp_path / "base-2" / "model"
    assert calls == [([f"{tmp_path}/base-{seed}"], 1, True) for seed in range(3)]
    assert capsys.readouterr().out.splitlines() == [
        f"base model, seed {seed}: sampled accuracy + 0.500, - {value}"
        for seed, value in enumerate(("0.009", "0.101", "0.100"))
    ]
    assert run.make_base(tmp_path, 9, range(4, 6)) == tmp_path / "base-4" / "model"
    few = run.make_base(tmp_path, 9, [3], (0.2, 0.3), "few")
    assert few == tmp_path / "few-3" / "model"
    message = r"no base model reached .* in \[0.01, 0.1\] with 2 seeds; see "
    with pytest.raises(RunError, match=message + str(tmp_path)):
        run.make_base(tmp_path, 9, range(2))


def test_the_demo_s_stages(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    calls = fake_training(monkeypatch, {})
    written: list[Any] = []

    def write_task(folder: Path, seed: int) -> None:
        written.append(("task", folder, seed))
        (folder / "init").mkdir(parents=True)
        (folder / "init" / "config.json").touch()

    def make_base(out: Path, steps: int) -> Path:
        written.append((out, steps))
        return Path("base")

    def write_report(folders: list[Path], out: Path) -> str:
        written.append(([folder.name for folder in folders], out))
        return "the page"

    monkeypatch.setattr(run, "write_task", write_task)
    monkeypatch.setattr(run, "make_base", make_base)
    monkeypatch.setattr(run, "write_report", write_report)
    monkeypatch.setattr(run, "results_table", lambda folders: f"table of {len(folders)}")
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda pid: set(range(3)))
    out = tmp_path / "demo"
    assert run.run_demo(out, ["sft", "gac"], (0, 4), steps=30, base_steps=70) == 0
    names = ["sft-0", "sft-4", "gac-0", "gac-4"]
    assert calls == [([f"{out}/{name}" for name in names], 3, True)]
    assert written == [("task", out / "task", 0), (out, 70), (names, out)]
    printed = capsys.readouterr().out
    assert "\ntable of 4\n" in printed and "Report: the page\n" in printed
    assert run.run_demo(out, ["sft"]) == 0 and run.run_demo(out, ["sft"], jobs=2) == 0
    assert calls[1:] == [([f"{out}/sft-0"], 1, True), ([f"{out}/sft-0"], 2, True)]
    planned: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            run, "run_all", lambda configs, *_, **__: planned.extend(c.steps for c in configs)
        )
        run.run_demo(out)
        assert planned == [160] * len(run.METHODS)
        run.run_demo(out, ["gac", "sft"], range(2), 30)
    assert planned[len(run.METHODS) :] == [30] * 4
    del written[7:]
    assert written[3:] == [(out, 400), (["sft-0"], out)] * 2  # the data are kept
    with pytest.raises(RunError, match=r"^.*demo/dft-1: failed: x$"):
        run.run_demo(out, ["dft"], (0, 1))
    with pytest.raises(ConfigError, match=r"--methods.*did you mean 'grpo'"):
        run.run_demo(out, ["sft", "grop"])
