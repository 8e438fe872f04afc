"""The demo's stages and settings, without training."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gac.config import dump
from gac.demo import run
from gac.demo.run import demo_fields
from gac.errors import ConfigError, RunError
from gac.methods import METHODS
from gac.report.reading import flatten
from gac.train_config import TrainConfig, teacher_of

TAUGHT = ("opd", "kdrl")


@pytest.mark.parametrize("name", TAUGHT)
def test_methods_with_another_model_as_teacher_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"teacher.path=null: method '{name}' needs a teacher"):
        run.method_config(Path("o"), Path("b"), name, 2, 80)


@pytest.mark.parametrize("name", [x for x in METHODS if x not in TAUGHT])
def test_runs_differ_only_in_their_method_and_its_data(name: str) -> None:
    """Durations are scaled to the steps, and every value is one that the method accepts."""
    first, other = (
        dict(flatten(dump(run.method_config(Path("o"), Path("b"), method, 2, 80))))
        for method in ("grpo", name)
    )
    changed = {k for k in first if not k.startswith("method.") and other.get(k) != first[k]}
    assert changed <= {"out", "run_name", "data.prompts", "data.demos", "teacher.top_k"}
    assert (other["out"], other["steps"], other["seed"]) == (f"o/{name}-2", 80, 2)
    own = METHODS[name]().sampling(8).demos == "prompt"
    assert ("data.demos" in changed) == own
    assert own == other["data.prompts"].endswith("demos.jsonl")
    for steps in (1, 5, 160):
        durations = dict(flatten(demo_fields(name, steps))).items()
        names = ("hold", "decay", "warmup", "hint_steps", "window", "calibration", "sft_steps")
        assert all(v <= steps for k, v in durations if k.rpartition(".")[2] in names)
        run.method_config(Path("o"), Path("b"), name, 0, steps)


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
            (out / "metrics.jsonl").write_text('{"step": 1, "tokens": 7000}\n')
            (out / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {c.out: "failed: x" for c in configs if c.out.endswith("dft-1")}

    monkeypatch.setattr(run, "run_all", run_all)
    return calls


def test_settings_of_the_stages() -> None:
    base, own = (
        dict(flatten(dump(config)))
        for config in (
            run.base_config(Path("o"), Path("o/base-3"), 3, 9),
            run.method_config(Path("o"), Path("b"), "gac", 2, 80),
        )
    )
    assert {
        "data.demo_field": "solution",
        "eval.data.prompts": "o/task/eval.jsonl",
        "eval.max_completion_length": 9,
        "eval.split_field": "op",
        "rollouts.num_prompts": 12,
        "rollouts.num_generations": 8,
        "rollouts.max_completion_length": 9,
        "micro_batch_size": 1000,
        "optim.betas": [0.9, 0.99],
        "optim.warmup_steps": 10,
        "model.path": "o/task/init",
        "model.random_init": True,
        "data.prompts": None,
        "data.demos": "o/task/base.jsonl",
        "optim.lr": 3e-3,
        "optim.min_lr_ratio": 0.0,
        "demo_batch_size": 64,
        "checkpoint_every": 100,
        "eval.samples": 4,
        "eval.temperature": 1.0,
        "steps": 9,
        "seed": 3,
    }.items() <= base.items()
    assert {
        "model.path": "b",
        "data.prompts": "o/task/prompts.jsonl",
        "data.demos": "o/task/demos.jsonl",
        "optim.lr": 2e-4,
        "demo_batch_size": 32,
        "checkpoint_every": 20,
        "eval.every": 20,
        "monitor_kl_every": 10,
        "export": False,
        "method.prior.high": 0.85,
        "method.prior.low": 0.15,
        "method.prior.hold": 4,
        "method.prior.decay": 80,
    }.items() <= own.items()


def test_the_stages_of_a_demo(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    calls = fake_training(monkeypatch, {"base-0": 0.05})
    assert run.run_demo(tmp_path, ["sft", "grpo"], range(2), steps=7) == 0
    outs = [f"{tmp_path}/{name}-{seed}" for name in ("sft", "grpo") for seed in range(2)]
    assert calls == [
        ([f"{tmp_path}/base-0"], 1, True),
        (outs, min(len(os.sched_getaffinity(0)), 4), True),
    ]
    assert re.search(
        r"\n\nStability and cost .*\n[- ]*\n*sft-0 .* 7\n(.*\n)*grpo-1 .* 7\n\n"
        rf"Total time: \d\d? s\.\nReport: {tmp_path}/report.html\nNext: gac demo .*\n.*\n$",
        capsys.readouterr().out,
    )
    # results in the documentation were measured with these data
    data = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("task/*.jsonl")))
    assert hashlib.sha256(data).hexdigest()[:16] == "0884508865128951"
    with pytest.raises(RunError, match=f"^{tmp_path}/dft-1: failed: x$"):
        run.run_demo(tmp_path, ["dft"], [1], jobs=3)
    assert calls[-1] == ([f"{tmp_path}/dft-1"], 3, True)


def test_seeds_of_the_base_model_are_tried_until_one_is_accepted(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    calls = fake_training(
        monkeypatch, {"base-0": 0.009, "base-1": 0.101, "base-2": 0.1, "base-4": 0.01}
    )
    assert run.make_base(tmp_path, 9) == tmp_path / "base-2" / "model"
    assert calls == [([f"{tmp_path}/base-{seed}"], 1, True) for seed in range(3)]
    assert capsys.readouterr().out.splitlines() == [
        f"base model, seed {seed}: sampled accuracy + 0.500, - {value}"
        for seed, value in enumerate(("0.009", "0.101", "0.100"))
    ]
    assert run.make_base(tmp_path, 9, range(4, 6)) == tmp_path / "base-4" / "model"
    message = r"no base model reached .* in \[0.01, 0.1\] with 2 seeds; see "
    with pytest.raises(RunError, match=message + str(tmp_path)):
        run.make_base(tmp_path, 9, range(2))


@pytest.mark.parametrize("name", ["sdft", "sdpg"])
def test_a_teacher_scores_no_more_tokens_than_the_demo_has(name: str) -> None:
    config = run.method_config(Path("o"), Path("b"), name, 0, 80)
    assert teacher_of(config).active
    assert teacher_of(config).candidates is None
