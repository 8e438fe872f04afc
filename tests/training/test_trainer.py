"""The training loop: recorded metrics, exact resumption, and rejected settings."""

import copy
import dataclasses
import functools
import gzip
import io
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gac.rollouts.generation import generate
from gac.rows import Batch, Row, collate
from gac.step_end import next_mix
from gac.training.export import export_run
from gac.training.record import Logbook
from gac.training.trainer import Trainer, train
from tests.tiny import REUSED, metrics, take_steps, tiny_config, write_tiny

# keys of metrics.jsonl that the contract lists
METRIC_KEYS = {
    *("step", "tokens", "mu", "mu_star", "prior", "alpha", "kl"),
    *("sft_variance", "rl_variance", "disagreement"),
    *("rollout_loss", "demo_loss", "entropy", "clip_fraction", "grad_norm", "reward_mean"),
    *("completions/mean_length", "sampled_tokens", "sampled_completions"),
    *("seconds", "sampling_seconds", "sampling_share", "completions_per_second"),
}


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


def next_gradients(trainer: Trainer) -> list[torch.Tensor]:
    """Run the trainer's next step and return its gradients."""
    return next_step(trainer)[1]


def next_step(trainer: Trainer) -> tuple[dict, list[torch.Tensor]]:
    """Run the trainer's next step and return its metrics and gradients."""
    captured: list[torch.Tensor] = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda *a, **k: (captured.extend(gradients(trainer)), step(*a, **k))
    return trainer._train_step(), captured


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of four steps with every kind of output."""
    folder = tmp_path_factory.mktemp("finished")
    rollouts = REUSED | {"num_iterations": 1, "log_samples_every": 2}
    changes = {"export": True, "checkpoint_every": 2, "rollouts": rollouts}
    return train(tiny_config(write_tiny(folder), folder / "run", **changes))


def test_files_of_a_run(finished):
    assert [entry["step"] for entry in Logbook(finished / "samples.jsonl").read()] == [1, 3]
    assert (finished / "config.yaml").exists()
    assert (finished / "model" / "config.json").exists()
    checkpoints = sorted(p.name for p in (finished / "checkpoints").glob("step-*"))
    assert checkpoints == ["step-00000002", "step-00000004"]


def test_evaluations_of_a_run(finished):
    evaluations = Logbook(finished / "eval.jsonl").read()
    assert [e["step"] for e in evaluations] == [0, 4]  # the start model and the trained model
    keys = {"accuracy", "accuracy/+", "accuracy/-", "response_length", "truncated"}
    keys |= {"step", "seconds", "ci95", "prompts", "demo_nll"}
    assert all(set(e) == keys for e in evaluations)


def test_answers_of_evaluations(finished):
    for evaluation in Logbook(finished / "eval.jsonl").read():
        path = finished / "evals" / f"step-{evaluation['step']:08d}.jsonl.gz"
        with gzip.open(path, "rt") as lines:
            scores = [json.loads(line)["score"] for line in lines]
        assert sum(scores) / len(scores) == pytest.approx(evaluation["accuracy"])


def test_metrics_of_a_run(finished):
    rows = Logbook(finished / "metrics.jsonl").read()
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert set(rows[0]) >= METRIC_KEYS
    assert "demo_nll/" not in rows[0]
    for r in rows:
        assert r["tokens"] > 0
        assert r["grad_norm"] > 0
        assert r["sampled_completions"] == 16


def test_times_and_rates_of_a_run(finished):
    for r in Logbook(finished / "metrics.jsonl").read():
        assert 0 < r["sampling_seconds"] < r["seconds"] < 600
        assert r["sampling_share"] == pytest.approx(r["sampling_seconds"] / r["seconds"])
        assert r["tokens_per_second"] == pytest.approx(r["tokens"] / r["seconds"])
        assert r["completions_per_second"] == pytest.approx(16 / r["sampling_seconds"])


def test_start_model_is_evaluated_once_without_side_effects(task, tmp_path):
    """The start model is evaluated before the first step, not on resume, and training uses the same
    random numbers with and without the evaluation.
    """
    config = tiny_config(
        task,
        tmp_path / "run",
        eval={
            "data": {"prompts": str(task / "eval.jsonl")},
            "max_completion_length": 5,
            "temperature": 1.0,
            "every": 2,
        },
    )
    start = Trainer(config)
    evaluated = start.evaluator(start.engine.load(start.model))
    out = train(dataclasses.replace(config, steps=2))
    train(dataclasses.replace(config, steps=4))
    rows = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert {**evaluated, "seconds": 0, "step": 0} == {**rows[0], "seconds": 0}
    assert metrics(out) == metrics(train(tiny_config(task, tmp_path / "without", eval={})))


@pytest.mark.parametrize(
    ("method", "unmeasured"),
    [
        pytest.param("sft", {"rollout_loss", "clip_fraction", "reward_mean"}, id="no-rollouts"),
        pytest.param("grpo", {"demo_loss", "demo_entropy", "sft_variance"}, id="no-demonstrations"),
        pytest.param("constant", set(), id="both"),
    ],
)
def test_unmeasured_metrics_are_null(task, tmp_path, method, unmeasured):
    out = train(tiny_config(task, tmp_path / "run", method=method, steps=2))
    names = {"rollout_loss", "demo_loss", "clip_fraction", "reward_mean", "sft_variance"}
    for row in metrics(out):
        assert {name for name in (*names, "demo_entropy") if row[name] is None} == unmeasured


def test_rows_without_signal_cost_no_backward_and_change_nothing(task, tmp_path):
    """If every rollout has the same reward, only the demonstrations have a gradient."""
    trainer = Trainer(
        tiny_config(
            task,
            tmp_path / "a",
            reward="tests.training.test_trainer:zero_reward",
            method={"name": "constant", "mu": 0.5},
        )
    )
    losses = []
    backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss: (losses.append(loss.item()), backward(loss))
    mixed = next_gradients(trainer)
    assert len(losses) == 1  # one micro-batch: the demonstrations
    for x, y in zip(
        mixed,
        next_gradients(Trainer(tiny_config(task, tmp_path / "b", method={"name": "sft"}))),
        strict=True,
    ):
        torch.testing.assert_close(x, 0.5 * y, rtol=1e-4, atol=1e-7)


def zero_reward(completion: str, example: object) -> float:
    return 0.0


def test_old_log_probs_of_reused_rollouts_start_at_ratio_one(task, tmp_path):
    once = Trainer(tiny_config(task, tmp_path / "a", method="grpo"))
    twice = Trainer(tiny_config(task, tmp_path / "b", method="grpo", rollouts=REUSED))
    for x, y in zip(next_gradients(once), next_gradients(twice), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-7)
    first = twice.rollouts
    twice.step += 1
    assert next_step(twice)[0]["sampled_completions"] == 0
    assert twice.rollouts is first
    assert first.old_logps


def test_demonstrations_are_scored_at_temperature_one(task, tmp_path):
    cold, hot = (
        tiny_config(task, tmp_path / f"{t}", method="sft", rollouts=REUSED | {"temperature": t})
        for t in (1.0, 2.0)
    )
    for x, y in zip(next_gradients(Trainer(cold)), next_gradients(Trainer(hot)), strict=True):
        assert torch.equal(x, y)


MISMATCH = {"sampling/mismatch_kl", "sampling/sampling_logp_difference/max"}


@pytest.mark.parametrize(
    ("changes", "columns", "method"),
    [
        ({}, MISMATCH | {"sampling/frac_corrected"}, "gac"),
        ({"correction": "none"}, MISMATCH, "gac"),
        ({"temperature": 0.7}, set(), "gac"),
        ({"top_p": 0.9}, set(), "gac"),
        ({}, set(), "dpo"),  # samples from the reference
    ],
)
def test_another_engine_is_compared_with_the_weights_that_sampled(
    task, tmp_path, changes, columns, method
):
    """If their log-probs are comparable; as in the loss of the steps that reuse rollouts."""
    rollouts = REUSED | {"function": "tests.training.test_keys:echo", **changes}
    trainer = Trainer(tiny_config(task, tmp_path, rollouts=rollouts, method=method))
    first, reusing = take_steps(trainer, 2)
    assert {key for key in first if key.startswith("sampling/")} == columns
    assert all(reusing[key] == first[key] for key in columns)


RESUMED: dict[str, dict[str, Any]] = {
    "gate, alarm and gradients": {"method": {"name": "gac-gated", "gradient_parts": 2}},
    "moving averages": {"method": "moco"},
    "collected demonstrations": {"method": {"name": "relift", "buffer": 3}},
    "reused rollouts": {"rollouts": REUSED},
    # it samples out of turn
    "reused after SFT": {"method": {"name": "sft-then-rl", "sft_steps": 2}, "rollouts": REUSED},
    "no rollouts": {"method": "sft"},
}


@functools.cache
def uninterrupted(task: Path, kind: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return metrics(train(tiny_config(task, Path(folder), steps=6, eval={}, **RESUMED[kind])))


@settings(max_examples=4)
@example("moving averages", 6)
@example("reused after SFT", 3)
@example("reused rollouts", 2)
@example("no rollouts", 3)
@given(st.sampled_from([*RESUMED]), st.integers(1, 6))
def test_a_run_interrupted_in_any_step_continues_exactly(task, kind, stop):
    """It stops when reused rollouts are used up."""
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(task, Path(folder), steps=6, eval={}, **RESUMED[kind])
        trainer = Trainer(config)

        def interrupt(*_: object) -> None:
            trainer.stop.requested = trainer.step + 1 >= stop  # as if Ctrl-C came during this step

        trainer.optimizer.register_step_pre_hook(interrupt)
        end = 3 * math.ceil(stop / 3) if kind.startswith("reused") else stop
        with pytest.raises(KeyboardInterrupt, match=f"step {end}") if end < 6 else nullcontext():
            trainer.run()
        assert metrics(train(config)) == uninterrupted(task, kind)


def test_a_run_that_is_extended_samples_before_the_next_reuse(task, tmp_path):
    for steps in (4, 5):
        train(tiny_config(task, tmp_path, steps=steps, eval={}, rollouts=REUSED))
    assert [row["sampled_completions"] > 0 for row in metrics(tmp_path)] == [1, 0, 0, 1, 1]


def test_run_that_its_method_ended_does_not_continue(task, tmp_path):
    config = tiny_config(
        task,
        tmp_path,
        method={"name": "sft-light", "patience": 1, "decay": 0.0, "epochs": 9},
        optim={"lr": 0.3, "warmup_steps": 1, "max_grad_norm": 0},  # the loss rises immediately
        eval={},
        steps=9,
    )
    train(config)
    rows = metrics(tmp_path)
    assert len(rows) < 9
    assert [row.get("ended") for row in rows[-2:]] == [None, 1]
    ended = Trainer(config)
    weights = [p.detach().clone() for p in ended.model.parameters()]
    ended.run()
    assert ended.step == len(rows)
    assert metrics(tmp_path) == rows
    assert all(map(torch.equal, weights, ended.model.parameters()))


def test_a_method_sees_what_its_step_measured(task, tmp_path, monkeypatch):
    observations = []
    record = lambda *call: (observations.append(call[2]), next_mix(*call))[1]  # noqa: E731 - a spy
    monkeypatch.setattr("gac.step_end.next_mix", record)
    trainer = Trainer(
        tiny_config(
            task,
            tmp_path,
            method="famo",
            optim={"lr": 0.1, "warmup_steps": 2, "max_grad_norm": 0},
            data={"prompts": str(task / "prompts.jsonl"), "source_field": "op"},
            monitor_kl_every=1,
        )
    )
    row, last = trainer._train_step(), observations[-1]
    before, after, demos = last.losses_before, last.losses_after, last.demo_losses
    assert after.demo != before.demo == last.demo_loss
    # without the ratio, the surrogate would not depend on the weights
    assert abs(after.rollout - before.rollout) > 1e-3
    assert len(demos) == 4
    assert min(demos) < last.demo_loss < max(demos)
    names = ("step", "kl", "entropy", "reward_mean", "rollout_loss", "demo_loss", "lr")
    assert {name: getattr(last, name) for name in names} == {name: row[name] for name in names}
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {last.lr} == {0.05}
    assert last.reward_variance == pytest.approx(statistics.pvariance(trainer.rollouts.rewards))
    assert {op: row[f"demo_nll/{op}"] for op in "+-"} == pytest.approx(
        {op: statistics.fmean(own) for op, own in last.losses_by_source.items()}
    )
    assert sorted(itertools.chain(*last.losses_by_source.values())) == sorted(demos)


def test_dropped_rewards_are_left_out(task, tmp_path):
    reward = {"name": "tests.training.test_trainer:half_reward", "on_error": "drop"}
    trainer = Trainer(
        tiny_config(task, tmp_path / "a", steps=1, method={"name": "grpo"}, reward=reward)
    )
    trainer._train_step()
    assert 0 < len(trainer.rollouts.rows) < 16
    assert trainer.sampler.reward.dropped == 16 - len(trainer.rollouts.rows)
    reward["name"] = "tests.training.test_trainer:nan_reward"
    row = Trainer(
        tiny_config(task, tmp_path / "b", method="grpo", loss={"kl_coef": 1}, reward=reward)
    )._train_step()
    assert row["reward_mean"] is row["kl"] is None
    assert row["rewards_dropped"] == 16


def nan_reward(completion: str, example: object) -> float:
    return math.nan


def half_reward(completion: str, example: object) -> float:
    return math.nan if completion[:1] in "01234" else float(len(completion))


def test_tensorboard_gets_the_metrics_and_the_evaluations(task, tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra `tensorboard` is not installed",
    )
    config = tiny_config(
        task,
        tmp_path / "run",
        steps=2,
        report_to=["tensorboard"],
        eval={"data": {"prompts": str(task / "eval.jsonl")}, "max_completion_length": 5},
    )
    trainer = Trainer(config)
    out = trainer.run()
    assert trainer.accelerator.trackers[0].tracker.all_writers is None  # closed
    assert trainer.heartbeat.activity == "step 2, evaluation"
    (file,) = (out / "gac").glob("events.out.tfevents*")
    events = accumulator.EventAccumulator(str(file)).Reload()
    assert [e.step for e in events.Scalars("eval/accuracy")] == [0, 2]
    assert [e.step for e in events.Scalars("mu")] == [1, 2]
    assert "step" not in events.Tags()["scalars"]
    identity = (out / "tracker_id").read_text()
    Trainer(config)  # resumes
    assert (out / "tracker_id").read_text() == identity


def test_a_terminal_shows_the_progress(task, tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    for steps in (2, 3):
        train(tiny_config(task, tmp_path, steps=steps, eval={}))
    assert {"0/2 |          | ", "2/2 |##########| ", "2/3 |######6   | ", "3/3 |##########| "} <= {
        *re.findall(r"./. \|.{10}\| ", terminal.getvalue())
    }


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_writes_more_than_checkpoints(
    task, tmp_path, monkeypatch, caplog, main
):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(Accelerator, "is_main_process", main)
    (tmp_path / "checkpoints").mkdir()
    model = {
        "path": str(task / "init"),
        "random_init": True,
        "dtype": "bfloat16",
        "master_weights": False,
    }
    train(tiny_config(task, tmp_path, steps=1, export=True, model=model))
    written = {"config.yaml", "metrics.jsonl", "eval.jsonl", "samples.jsonl", "model", "evals"}
    assert ({path.name for path in tmp_path.iterdir()} - {".lock"}) == {
        "checkpoints",
        *(written if main else ()),
    }
    assert bool(terminal.getvalue()) == ("of the updates of the weights" in caplog.text) == main


def test_a_resumed_run_continues_its_tracked_run(task, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda _, *arguments: calls.append(arguments))
    trainer = Trainer(tiny_config(task, tmp_path / "run"))
    for name, new in (("", False), ("mine", False), ("", True)):  # the first has no id
        trainer.record.start_trackers(
            dataclasses.replace(trainer.config, report_to=("wandb",), run_name=name), new
        )
    first, resumed, other = (options["wandb"] for _, _, options in calls)
    assert [run["name"] for run in (first, resumed, other)] == ["run", "mine", "run"]
    assert resumed["resume"] == "allow"
    assert calls[0][1]["optim"]["lr"] == 1e-3
    assert first["id"] == resumed["id"] != other["id"]
    monkeypatch.setattr(Accelerator, "log", lambda _, values, step: calls.append((values, step)))
    trainer.record.evaluation({"step": 3, "accuracy": 0.5, "ci95": [0.4, 0.6]})
    assert calls[-1] == ({"eval/step": 3, "eval/accuracy": 0.5}, 3)


def test_lora_run_uses_the_base_model_as_reference(task, tmp_path):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    out = train(
        tiny_config(
            task,
            tmp_path / "run",
            model={"path": str(task / "init"), "random_init": True, "lora": {"rank": 2}},
            steps=2,
            method="gac",
            monitor_kl_every=1,
        )
    )
    # adapters start at zero
    assert metrics(out)[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics(out)[1]["kl"] > 1e-4
    export_run(out, tmp_path / "adapters", adapters=True)
    assert (tmp_path / "adapters" / "adapter_config.json").exists()


def test_collate_scores_response_tokens_only():
    batch = collate(
        [Row((5, 6, 7, 8), 2, False, 1.5), Row((5, 9), 1, True), Row((4, 4, 4), 3, False)],
        pad_token=0,
    )
    assert batch.targets.tolist() == [[-100, 7, 8, -100], [9, -100, -100, -100], [-100] * 4]
    assert batch.model_inputs["input_ids"].tolist() == [[5, 6, 7, 8], [5, 9, 0, 0], [4, 4, 4, 0]]
    assert batch.model_inputs["attention_mask"].sum(1).tolist() == [4, 2, 3]
    assert collate([], 0).targets.tolist() == [[-100]]


def test_row_and_batch_fields_do_not_shadow_tuple_attributes():
    assert not (set(Row._fields) | set(Batch._fields)) & set(dir(tuple))


def test_generation_ignores_the_models_own_sampling_defaults(task, tmp_path):
    """A checkpoint may set top_k or a repetition penalty, which would make sampling off-policy."""
    trainer = Trainer(tiny_config(task, tmp_path / "run"))
    model, prompts = trainer.model, [(4, 5, 6)] * 2
    settings = {"max_completion_length": 6, "temperature": 1.0, "num_generations": 8}
    torch.manual_seed(0)
    expected = generate(model, trainer.tokenizer, prompts, **settings)
    defaults = copy.deepcopy(model.generation_config)
    defaults.top_k, defaults.repetition_penalty = 1, 5.0
    model.generation_config = defaults
    torch.manual_seed(0)
    assert generate(model, trainer.tokenizer, prompts, **settings) == expected
    assert model.generation_config is defaults
    assert len(set(expected)) > 4
