"""Failures provoked in real runs: non-finite steps, full disks, killed and hung processes."""

import copy
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from gac.errors import CheckpointError, ConfigError, RunError
from gac.faults import checkpoint, processes
from gac.methods import Observation
from gac.step_end import next_mix
from gac.train_config import GuardConfig
from gac.training.record import Logbook
from gac.training.replay import load_skipped, replay
from gac.training.step import Guard, Step
from gac.training.trainer import Trainer, train
from tests import ranks
from tests.tiny import digit_reward, metrics, tiny_config, with_config


def overflowing(completion, example):
    """Finite in float64 but not in float32: one prompt in 16 makes its step's loss inf or nan."""
    return digit_reward(completion, example) * (1e300 if int(example.id) == 0 else 1)


def exploding(completion, example):
    """Large enough for an absurd gradient norm, small enough to stay finite."""
    return digit_reward(completion, example) * (1e9 if int(example.id) == 0 else 1)


def always_overflowing(completion, example):
    return digit_reward(completion, example) * 1e300


def faulty_config(task, out, reward, num_generations=4, **changes):
    rollouts = {
        "num_prompts": 4,
        "num_generations": num_generations,
        "max_completion_length": 5,
        "scale_rewards": "centered",
    }
    return tiny_config(
        task,
        out,
        reward=f"tests.faults.test_faults:{reward}",
        rollouts=rollouts,
        **{"steps": 8, **changes},
    )


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("reward", "fault"),
    [("overflowing", "rollout_loss is"), ("exploding", "above guards.skip_above_norm=100000")],
)
def test_broken_step_is_skipped_and_replayed(task, tmp_path, monkeypatch, reward, fault):
    observations = []
    record = lambda *call: (observations.append(call[2]), next_mix(*call))[1]  # noqa: E731 - a spy
    monkeypatch.setattr("gac.step_end.next_mix", record)
    trainer = Trainer(faulty_config(task, tmp_path, reward))
    before = weights(trainer)
    while trainer.guard.skipped == 0:
        before, state = weights(trainer), trainer.optimizer.state_dict()["state"]
        steps = [int(s["step"]) for s in state.values()]
        trainer._train_step()
        trainer.step += 1
        assert trainer.step <= 8
    assert all(map(torch.equal, before, weights(trainer)))
    assert steps == [int(s["step"]) for s in trainer.optimizer.state_dict()["state"].values()]
    # the skipped step does not influence the next one
    assert observations[-1] == Observation(trainer.step)

    replayed = replay(trainer.first_skipped)
    recorded, recomputed = replayed["recorded"], replayed["recomputed"]
    assert fault in recorded["fault"]
    assert recorded["step"] == trainer.step - 1
    values = [[results[name] for name in recomputed] for results in (recorded, recomputed)]
    torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-6, atol=0, equal_nan=True)
    if reward == "overflowing":
        rows = [row.advantage for row in load_skipped(trainer.first_skipped)[0].step.rows]
        found = [(c["row"], c["advantage"], c["demonstration"]) for c in replayed["culprits"]]
        assert found
        assert found == [(i, x, False) for i, x in enumerate(rows) if abs(x) > 1e200]


FULL = torch.OutOfMemoryError("full")
ON_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("changes", "part", "error", "message"),
    [
        ({}, "gradients", FULL, r"in step 1: rows have up to \d+ tokens: .* or micro_batch_size$"),
        ({"max_tokens_per_micro_batch": 9}, "gradients", FULL, "in .* or max_tokens_per_micro_"),
        ({}, "sampler", FULL, "while sampling for step 1: lower rollouts.generation_batch_size, "),
        (
            {"rollouts": {"max_completion_length": 5, "generation_batch_tokens": 999}},
            *("sampler", FULL, "while sampling .*: lower rollouts.generation_batch_tokens, "),
        ),
        (
            {"rollouts": {"max_completion_length": 5, "engine": "paged"}},
            *("sampler", FULL, "while sampling .*: lower rollouts.paged.num_blocks, "),
        ),
        ({}, "evaluator", ON_CPU, "in the evaluation after step 0: lower eval.batch, "),
        ({}, "gradients", RuntimeError("an operator failed"), None),
    ],
)
def test_out_of_memory_names_the_keys_to_lower(task, tmp_path, changes, part, error, message):
    without = {} if part == "evaluator" else {"eval": {}}  # else the start model is evaluated
    trainer = Trainer(tiny_config(task, tmp_path, **without, **changes))
    setattr(trainer, part, Mock(side_effect=error))
    expected = f"out of memory {message}" if message else str(error)
    with pytest.raises(RuntimeError, match=f"^{expected}"):
        trainer.run()


def assert_reproduced(path):
    """Replay the step saved at `path`, and return the results."""
    replayed = replay(path)
    for name in ("grad_norm", "rollout_loss", "demo_loss"):
        expected = pytest.approx(replayed["recorded"][name], rel=1e-5, abs=1e-7)
        assert replayed["recomputed"][name] == expected, name
    return replayed


@pytest.mark.parametrize(
    "method",
    [
        pytest.param({"name": "aligned-mtl", "preference": [1.0, 0.0]}, id="a-negative-weight"),
        pytest.param({"name": "sdmgrad"}, id="several-parts-of-each-term"),
        pytest.param({"name": "moco"}, id="moving-averages"),
        pytest.param(
            {"name": "gac", "signals": "gradients", "update_every": 2}, id="measured-gradients"
        ),
        pytest.param({"name": "famo"}, id="weights-from-the-losses"),
    ],
)
def test_replay_reproduces_the_methods_step(two_layers, tmp_path, method):
    """Three steps are skipped, saved and replayed; the norm is that of the combined gradient."""
    trainer = Trainer(
        faulty_config(
            two_layers, tmp_path, "digit_reward", 2, method=method, micro_batch_size=3, seed=1
        )
    )
    for _ in range(4):
        trainer._train_step()
        trainer.step += 1
    trainer.guard.config = GuardConfig(skip_above_norm=1e-9)  # from here on, every step is skipped
    before, state = weights(trainer), copy.deepcopy(trainer.state)
    averages = {k: v.clone() for k, v in trainer.gradients.tracked.items()}
    assert bool(averages) == (method["name"] == "moco")
    assert all(v.any() for v in averages.values())
    for _ in range(3):
        trainer._train_step()
        trainer.step += 1
        assert all(map(torch.equal, before, weights(trainer)))
    assert all(torch.equal(averages[k], v) for k, v in trainer.gradients.tracked.items())
    if trainer.method.family == "gradient solver":
        # `solve` had no effect; only `mix` counts the steps
        assert {**trainer.state, "step": 0} == {**state, "step": 0}
    saved = sorted((tmp_path / "replay").iterdir())
    assert len(saved) == 3
    if "preference" in method:
        assert any(
            min(pair) < 0
            for pair in [torch.load(path / "rank-0.pt")["term_weights"] for path in saved]
        )
    for path in (saved[0], saved[-1]):
        replayed = assert_reproduced(path)
        assert replayed["recorded"]["grad_norm"] > 0
        assert replayed["culprits"] == []


def test_each_run_of_skipped_steps_is_replayed_with_its_own_weights(task, tmp_path):
    """Three steps: skipped, applied, skipped. The dropout masks are replayed too."""
    folder = with_config(task, tmp_path / "task", attention_dropout=0.2)
    model = {"path": str(folder / "init"), "random_init": True, "keep_dropout": True}
    trainer = Trainer(
        faulty_config(
            folder, tmp_path, "digit_reward", model=model, optim={"lr": 0.05, "warmup_steps": 1}
        )
    )
    for limit in (1e-9, 1e5, 1e-9):
        trainer.guard.config = GuardConfig(skip_above_norm=limit)
        trainer._train_step()
        trainer.step += 1
    saved = sorted((tmp_path / "replay").iterdir())
    assert len(saved) == 2
    for path in saved:
        assert_reproduced(path)


@pytest.mark.parametrize("method", ["pcgrad", "moco", "famo"])
def test_no_state_keeps_a_broken_step(task, tmp_path, method):
    """Inner products, moving averages of gradients and the losses for the next step are clean."""
    out = train(faulty_config(task, tmp_path, "overflowing", method={"name": method}))
    rows = metrics(out)
    assert rows[-1]["skipped"] == 2
    assert [r["step"] for r in rows] == list(range(1, 9))
    assert all(math.isfinite(r["mu"]) for r in rows)
    for before, row in zip([{"skipped": 0}, *rows], rows, strict=False):
        assert (row["grad_norm"] is not None and row["rollout_loss"] is not None) == (
            row["skipped"] == before["skipped"]
        )
    first, _ = sorted((out / "replay").iterdir())  # the prompt comes once per epoch of 4 steps
    assert replay(first)["culprits"]


@pytest.mark.parametrize("kept", [[0, 1], [1, 2]])
def test_too_many_broken_steps_stop_the_run_with_the_last_good_weights(
    task, tmp_path, monkeypatch, caplog, kept
):
    """The first two skipped steps that can be written are kept."""
    config = faulty_config(
        task, tmp_path, "always_overflowing", guards={"patience": 3, "max_saved_steps": 2}
    )
    trainer = Trainer(config)
    before = weights(trainer)
    with pytest.raises(RunError, match="checkpoints$"):  # without a saved batch
        trainer._abort()
    first, second = (tmp_path / "replay" / f"step-0000000{step}" for step in kept)
    first.mkdir(parents=True)
    (first / "rank-1.pt").touch()  # of an earlier attempt

    def fail(*_):
        monkeypatch.undo()
        raise OSError("no space")

    if kept[0]:
        monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(RunError, match=r"patience=3.* rollout_loss .* step 3 in .*gac replay"):
        trainer.run()
    saved = Trainer(config)
    assert saved.step == 3
    assert all(map(torch.equal, before, weights(saved)))
    assert (saved.guard.skipped, saved.guard.consecutive) == (3, 0)
    assert sorted((tmp_path / "replay").iterdir()) == [first, second]
    assert bool(re.search(r"\(not saved: .* free \(rank 0: no space\)\)", caplog.text)) == bool(
        kept[0]
    )
    # the weights did not change in between, so the second step refers to the first one's copy
    assert not (second / "weights").exists()
    assert replay(first)["culprits"]
    assert replay(second)["culprits"]


@pytest.mark.parametrize("method", ["sdar", "grpo"])
def test_one_process_replays_the_teacher_of_every_rank(method, task, tmp_path):
    """The rows of rank 1 are numbered after those of rank 0, also in the teacher's log-probs.

    Or in its hidden states, whose head is saved as well.
    """
    (tmp_path / "one.jsonl").write_text(min((task / "prompts.jsonl").open()))
    config = faulty_config(
        task,
        tmp_path,
        "digit_reward",
        steps=1,
        method=method,
        guards={"skip_above_norm": 1e-9},
        data={"prompts": str(tmp_path / "one.jsonl")},
        teacher={"self": True, "top_k": None} if method == "grpo" else {},
    )
    ranks.run(train, config, ranks=2)
    (path,) = (tmp_path / "replay").iterdir()
    first, second = (Step.restore(torch.load(file)["step"]) for file in path.glob("rank-*.pt"))
    # the random numbers differ, also those of dropout, although all prompts are the same
    assert [r.ids for r in first.rows] != [r.ids for r in second.rows]
    assert first.seed != second.seed
    recorded = assert_reproduced(path)["recorded"]
    assert method == "grpo" or recorded["rollout_loss"] != 0
    assert bool(first.teacher_hidden) == (method == "grpo")


@pytest.mark.parametrize("method", ["gac", "moco"])
def test_ranks_agree_on_a_broken_step_and_one_process_replays_it(task, tmp_path, method):
    """Covers moving averages too, which are stored under single-process parameter names."""
    ranks.run(
        train,
        faulty_config(task, tmp_path, "overflowing", steps=4, method={"name": method}),
        ranks=2,
    )
    assert [r["skipped"] for r in metrics(tmp_path)][-1] == 1
    (path,) = (tmp_path / "replay").iterdir()
    assert sorted(p.name for p in path.glob("rank-*")) == ["rank-0.pt", "rank-1.pt"]
    replayed = replay(path)
    recorded, recomputed = replayed["recorded"], replayed["recomputed"]
    assert replayed["culprits"]
    assert not math.isfinite(recomputed["rollout_loss"])
    assert recomputed["demo_loss"] == pytest.approx(recorded["demo_loss"], rel=1e-5)
    rows = [row.ids for row in load_skipped(path)[0].step.rows]
    for rank, other in ((1, 10), (0, 9)):
        (path / f"rank-{rank}.pt").rename(path / f"rank-{other}.pt")
    assert [row.ids for row in load_skipped(path)[0].step.rows] == rows  # in the order of the ranks


def test_replay_needs_only_the_models(task, tmp_path, monkeypatch):
    """Replay needs no data and no reward function and writes nothing; the saved step is enough.

    A single process ignores `parallel`. The path of the step may be relative.
    """
    shutil.copytree(task, tmp_path / "task")
    folder = tmp_path / "task"
    settings = {"guards": {"patience": 1}, "parallel": {"mode": "fsdp", "replicas": 2}}
    config = faulty_config(folder, tmp_path / "run", "always_overflowing", **settings)
    with pytest.raises(RunError, match="patience=1"):
        train(config)
    for file in folder.glob("*.jsonl"):
        file.unlink()
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    monkeypatch.chdir(tmp_path / "run" / "replay")
    assert replay(Path("step-00000000"))["culprits"]
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}


def test_files_of_another_version_are_rejected_in_one_line(task, tmp_path):
    config = faulty_config(task, tmp_path, "always_overflowing", guards={"patience": 1})
    with pytest.raises(RunError, match="patience=1"):
        train(config)
    path = checkpoint.newest_checkpoint(tmp_path / "checkpoints") / checkpoint.PROGRESS
    content = json.loads(path.read_text())["content"]
    del content["format"]
    path.write_text(json.dumps({"checksum": checkpoint._checksum_of(content), "content": content}))
    with pytest.raises(ConfigError, match=r"^[^\n]*another version[^\n]*another `out`$"):
        Trainer(config)
    (path,) = (tmp_path / "replay").iterdir()
    # with another number, the steps saved by this version could no longer be replayed
    assert torch.load(path / "rank-0.pt")["format"] == 3
    torch.save({"format": Path("x")}, path / "rank-0.pt")
    with pytest.raises(pickle.UnpicklingError):
        replay(path)  # the file runs no code
    torch.save({"step": 0, "fault": "rollout_loss is inf"}, path / "rank-0.pt")
    with pytest.raises(ConfigError, match=r"^[^\n]*step-00000000 [^\n]*another version[^\n]*$"):
        replay(path)


FINE = {"rollout_loss": 0.1, "demo_loss": 0.2}


def test_the_guard_judges_the_norm_and_the_losses():
    guard = Guard(GuardConfig(skip_above_norm=10))
    assert guard.judge(10.0, FINE) is None
    assert guard.fault is None
    assert guard.judge(11.0, FINE) == "grad_norm is 11, above guards.skip_above_norm=10"
    assert guard.judge(math.inf, FINE) == "grad_norm is inf"
    assert guard.judge(math.nan, {**FINE, "demo_loss": math.nan}) == "demo_loss is nan"


def test_the_guard_is_exhausted_by_consecutive_skips():
    guard = Guard(GuardConfig(skip_above_norm=10, patience=2))
    guard.judge(11.0, FINE)
    assert not guard.exhausted
    guard.judge(math.inf, FINE)
    assert guard.exhausted
    guard.judge(1.0, FINE)
    assert not guard.exhausted
    assert guard.skipped == 2
    assert guard.fault == "grad_norm is inf"  # the last one
    guard.judge(math.nan, FINE)
    assert guard.consecutive == 1


def test_the_state_of_a_guard():
    guard = Guard(GuardConfig(patience=2))
    guard.judge(math.nan, FINE)
    guard.kept = 7
    state = guard.state_dict()
    assert state == {"skipped": 1, "consecutive": 1, "kept": 7}
    guard.judge(-math.inf, FINE)
    assert guard.state_dict() == {"skipped": 2, "consecutive": 0, "kept": 7}  # it was exhausted
    restored = Guard(GuardConfig())
    assert restored.state_dict() == {"skipped": 0, "consecutive": 0, "kept": 0}
    restored.load_state_dict(state)
    assert restored.state_dict() == state


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    available = shutil.which("mount") is not None
    if not available or subprocess.run(mount, capture_output=True, timeout=60).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=60)


def fill(disk: Path, leave: int) -> Path:
    """Fill `disk` with a file, up to `leave` bytes; return the file."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        file.write(b"x" * (shutil.disk_usage(disk).free - leave))
    return filler


def test_a_full_disk_stops_the_run_without_data_loss(task, tmp_path, small_disk):
    uninterrupted = train(tiny_config(task, tmp_path / "uninterrupted", steps=6))
    trainer = Trainer(tiny_config(task, small_disk / "run", steps=6, checkpoint_every=2))
    files = (uninterrupted / "checkpoints" / "step-00000006").iterdir()
    filler = fill(small_disk, leave=sum(f.stat().st_size for f in files) * 3 // 2)
    with pytest.raises(CheckpointError, match=r"where 0\.\d MB are free .* rerun the command"):
        trainer.run()
    assert checkpoint.newest_checkpoint(trainer.checkpoints) is not None
    filler.unlink()
    assert metrics(train(tiny_config(task, small_disk / "run", steps=6))) == metrics(uninterrupted)


@pytest.mark.parametrize(
    "changes", [{"checkpoint_every": 2}, {"keep_checkpoints": 1, "checkpoint_every": 1}]
)
def test_a_full_disk_is_rejected_before_the_first_step(task, small_disk, changes):
    fill(small_disk, leave=200_000)
    with pytest.raises(RunError, match="2 checkpoints .* GB are free.*keep_checkpoints"):
        Trainer(tiny_config(task, small_disk / "run", **changes))


def test_an_unwritable_metrics_file_is_reported(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")  # a device that is always full
    with pytest.raises(RunError, match=r"metrics.jsonl .No space left.*rerun the command"):
        Logbook(tmp_path / "metrics.jsonl").append({"step": 1})


def test_torn_last_line_is_dropped(tmp_path):
    book = Logbook(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        book.append({"step": step, "loss": math.nan})
    book.path.write_text(book.path.read_text()[:-5])
    book.truncate(9)
    assert [json.loads(line) for line in book.path.read_text().splitlines()] == [
        {"step": 1, "loss": None},
        {"step": 2, "loss": None},
    ]


def test_resuming_with_another_process_count_needs_resize(task, tmp_path):
    config = tiny_config(task, tmp_path, steps=2)
    ranks.run(train, config, ranks=2)
    with pytest.raises(ConfigError, match=r"_change=False.* 2 processes but 1 .*_change=true"):
        Trainer(config)
    assert (
        Trainer(
            tiny_config(task, tmp_path, steps=2, parallel={"allow_world_size_change": True})
        ).step
        == 2
    )


def hang_rank_1(config):
    """Rank 1 stops responding mid-run, like a machine that lost its network."""
    processes.INTERVAL, processes.DEAD_AFTER = 0.2, 1.0
    trainer = Trainer(config)
    if trainer.accelerator.process_index == 1:
        step = trainer._train_step
        trainer._train_step = lambda: (
            step() if trainer.step < 2 else os.kill(os.getpid(), signal.SIGSTOP)
        )
    trainer.run()


def test_a_hung_rank_fails_the_job_within_its_timeout(task, tmp_path):
    with ranks.job(
        hang_rank_1,
        tiny_config(task, tmp_path, steps=6, checkpoint_every=2, parallel={"timeout": 8}),
        ranks=2,
    ) as (rank_0, rank_1):
        failed = rank_0.result()
        assert rank_1.kill()  # it would hang forever
    assert re.search("rank 1 is not responding.*resume from", str(failed.error))
    assert checkpoint.newest_checkpoint(tmp_path / "checkpoints").name == "step-00000002"
