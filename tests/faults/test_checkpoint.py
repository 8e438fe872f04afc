"""Checkpoints: atomic writes, verification, pruning, export, rejection of another run's."""

import json
import logging
import re
import runpy
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, AutoTokenizer

from gac.collectives import gather, rank
from gac.errors import CheckpointNotFound, ConfigError, RunError
from gac.faults import checkpoint
from gac.faults.checkpoint import CheckpointError
from gac.parallel.config import ParallelConfig
from gac.parallel.process_group import make_accelerator
from gac.training.export import export_run
from gac.training.trainer import Trainer, train
from tests import ranks
from tests.tiny import metrics, tiny_config


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one step, in which the last layer has no gradient."""
    model = torch.nn.Sequential(*(torch.nn.Linear(n, n - 1) for n in (4, 3, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[:2](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(folder: Path, *steps: int) -> list[Path]:
    return [checkpoint.save(folder, step, *small(), {"note": step}) for step in steps]


def test_save_load_round_trip(tmp_path):
    model, optimizer = small()
    note = {"note": {10: (1, 2), 9: 3}}  # JSON has no tuples and only texts as keys
    path = checkpoint.save(tmp_path, 7, model, optimizer, note, {"x": torch.ones(2)})
    assert tmp_path.resolve() not in [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    torch.manual_seed(1)
    loaded_model, loaded_optimizer = small()
    loaded_optimizer.state.clear()
    extra = {"x": torch.zeros(2)}
    loaded_optimizer.param_groups[0]["lr"] = 0.5
    progress = checkpoint.load(path, loaded_model, loaded_optimizer, extra)
    assert loaded_optimizer.param_groups[0]["lr"] == 0.1
    assert extra["x"].tolist() == [1, 1]
    assert (progress["step"], progress["note"]) == (7, {"10": [1, 2], "9": 3})
    for x, y in zip(model.parameters(), loaded_model.parameters(), strict=True):
        assert torch.equal(x, y)
    saved, loaded = (o.state_dict()["state"] for o in (optimizer, loaded_optimizer))
    assert saved.keys() == loaded.keys() == {0, 1, 2, 3}
    assert all(torch.equal(saved[i][k], loaded[i][k]) for i in saved for k in saved[i])


def test_saving_before_the_first_update_does_not_count_as_an_update(tmp_path):
    """torch initializes AdamW's state by taking a step, which would shift the bias correction."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    assert not optimizer.state
    checkpoint.load(path, model, optimizer)
    assert not optimizer.state


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("__0_0.distcp", truncate, r"bytes instead of SIZE\)"),
        ("__0_0.distcp", flip, "checksum"),  # same size: only the checksum detects it
        ("__0_0.distcp", Path.unlink, "missing"),
        ("__0_0.distcp", make_unreadable, "Is a directory"),
        (".metadata", truncate, r"bytes instead of SIZE\)"),
        ("progress.json", truncate, "cannot be read"),
        ("progress.json", flip, "cannot be read|checksum"),
    ],
)
def test_damage_is_reported_and_the_previous_checkpoint_is_used(
    tmp_path, caplog, monkeypatch, file, damage, message
):
    monkeypatch.setattr(checkpoint, "BLOCK", 64)
    first, second = save(tmp_path, 10, 20)
    message = message.replace("SIZE", str((second / file).stat().st_size))
    damage(second / file)
    with pytest.raises(CheckpointError, match=r"step-00000020 is damaged \(.*choose another check"):
        checkpoint.verify(second)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_checkpoint(tmp_path) == first
    assert "step-00000020 is damaged" in caplog.text
    assert re.search(message, caplog.text)
    # the damaged one was renamed: pruning counts only intact ones, and its name can be reused
    assert checkpoint.list_complete(tmp_path) == [first]
    assert (tmp_path / "damaged-00000020").is_dir()
    assert checkpoint.newest_checkpoint(tmp_path) == first


def test_a_step_that_is_damaged_twice_is_renamed_twice(tmp_path):
    damaged = tmp_path / "damaged-00000020"
    for number in (1, 2):
        (path,) = save(tmp_path, 20)
        (path / "progress.json").write_text(f"{number}")
        assert checkpoint.newest_checkpoint(tmp_path) is None
        assert (damaged / "progress.json").read_text() == f"{number}"


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"content": {}}', '{"content": {}, "checksum": 1}']
)
def test_progress_that_is_not_progress_cannot_be_read(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="progress.json (cannot be read|does not match)"):
            checkpoint.read_progress(folder)


def test_the_checksum_of_progress_does_not_depend_on_the_order_of_its_keys(tmp_path):
    (tmp_path / "progress.json").write_text('{"checksum": 3954143967, "content": {"b": 1, "a": 2}}')
    assert checkpoint.read_progress(tmp_path) == {"a": 2, "b": 1}


def test_weights_without_an_optimizer_round_trip(tmp_path):
    model, _ = small()
    path = tmp_path / "replay" / "weights"
    path.mkdir(parents=True)
    (path / "__9_0.distcp").touch()
    checkpoint.write_weights(path, model, {"x": torch.tensor([2.0, 3.0])})
    assert not (path / "__9_0.distcp").exists()
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    assert {"further.x", "model.0.weight"} < names.keys()
    torch.manual_seed(1)
    loaded, _ = small()
    extra = {"x": torch.zeros(2)}
    checkpoint.load_weights(path, loaded, extra)
    assert extra["x"].tolist() == [2, 3]
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    checkpoint.write_weights(tmp_path / "new" / "weights", model, {})
    checkpoint.load_weights(tmp_path / "new" / "weights", loaded)
    bias = {"1.bias": checkpoint.model_tensors(path)["1.bias"]}
    assert checkpoint.read_tensors(path, bias)["1.bias"].tolist() == model[1].bias.tolist()


def test_half_written_checkpoints_are_ignored(tmp_path):
    (first,) = save(tmp_path, 10)
    partial = tmp_path / ".writing-00000020"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".writing-00000030").touch()  # a file, which cannot be deleted like a folder
    assert checkpoint.newest_checkpoint(tmp_path) == first
    checkpoint.prune(tmp_path, 2, best=None)
    assert not partial.exists()


def test_a_half_written_checkpoint_is_replaced(tmp_path, monkeypatch):
    partial = tmp_path / ".writing-00000020"
    partial.mkdir()
    (partial / "__7_0.distcp").write_bytes(b"half")
    (path,) = save(tmp_path, 20)
    assert not partial.exists()
    assert not (path / "__7_0.distcp").exists()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **options: None)
    assert (
        save(tmp_path, 20) == [path] == checkpoint.list_complete(tmp_path)
    )  # nothing is deleted before


def test_tensors_of_the_model_are_listed_without_the_optimizers(tmp_path):
    model, optimizer = small()
    path = checkpoint.save(tmp_path, 1, model.bfloat16(), optimizer, {})
    meta = {name: x.to("meta") for name, x in model.state_dict().items()}
    listed = checkpoint.model_tensors(path)
    assert listed.keys() == meta.keys()
    assert all(x.is_meta for x in listed.values())
    for name, x in listed.items():
        assert (x.shape, x.dtype) == (meta[name].shape, torch.bfloat16)
    assert all(
        torch.equal(x, model.state_dict()[name])
        for name, x in checkpoint.read_tensors(path, listed).items()
    )


def test_a_failed_write_names_its_cause(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="not JSON serializable"):  # not an error of the disk
        checkpoint.save(tmp_path, 1, *small(), {"note": {1}})
    errors = {0: (ValueError("no space\nin lines"), None), 1: (OSError("of rank 1"), None)}

    def fail(*_, **__):
        raise CheckpointException("write", errors)

    monkeypatch.setattr(checkpoint.dcp, "save", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    (tmp_path / "file").touch()
    for folder, problem in (
        (tmp_path, r"1000000.0 MB are free \(rank 0: ValueError: no space\)"),
        (tmp_path / "file" / "new", r"nan MB are free \(rank 0: .*Not a directory.*\)"),
    ):
        with pytest.raises(CheckpointError, match=f"where {problem}; free some"):
            save(folder, 1)
    assert not checkpoint.list_complete(tmp_path)
    errors[1] = KeyboardInterrupt(), None
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)


def test_importing_hides_only_the_warning_about_a_single_process():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        runpy.run_path(checkpoint.__file__)
        for text in ("torch.distributed is disabled", "another"):
            warnings.warn(text, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another"]


def test_a_missing_step_is_named_with_the_available_ones(tmp_path):
    with pytest.raises(CheckpointNotFound, match="step 3 in .*; available steps: none$"):
        checkpoint.find(tmp_path, 3)
    save(tmp_path, 10, 2)
    save(tmp_path, 10)  # again, which replaces it
    with pytest.raises(CheckpointNotFound, match="; available steps: 2, 10$"):
        checkpoint.find(tmp_path, 3)
    assert checkpoint.find(tmp_path, 10).name == "step-00000010"


def test_an_interrupt_while_a_checkpoint_is_read(tmp_path, monkeypatch):
    """torch wraps Ctrl-C in an exception of its own, which would end in a traceback."""
    model, optimizer = small()
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemReader.read_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(path, model, optimizer)


def test_the_newest_and_the_best_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5)
    checkpoint.prune(tmp_path, 2, best=2)
    assert [p.name[-1] for p in checkpoint.list_complete(tmp_path)] == ["2", "4", "5"]


def test_resume_from_the_checkpoint_before_a_damaged_one(task, tmp_path):
    uninterrupted = train(tiny_config(task, tmp_path / "uninterrupted", steps=6))
    out = train(tiny_config(task, tmp_path / "damaged", steps=6, checkpoint_every=2))
    truncate(out / "checkpoints" / "step-00000006" / "__0_0.distcp")
    resumed = Trainer(tiny_config(task, out, steps=6))
    assert resumed.step == 4
    resumed.run()
    assert metrics(out) == metrics(uninterrupted)


def logits(folder: Path) -> torch.Tensor:
    """Logits of the exported model on a fixed input."""
    return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[3, 4, 5, 6]])).logits


def test_export_loads_in_transformers(task, tmp_path, monkeypatch):
    run = train(tiny_config(task, tmp_path / "run", checkpoint_every=2))
    assert export_run(run, tmp_path / "last").name == "step-00000004"
    (tmp_path / "second").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "second")
        export_run(run, Path(), step=2)
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "last").encode("+1234=")])
    assert torch.equal(
        Trainer(tiny_config(task, run)).model.eval()(ids).logits,
        AutoModelForCausalLM.from_pretrained(tmp_path / "last")(ids).logits,
    )
    assert not torch.equal(logits(tmp_path / "last"), logits(tmp_path / "second"))
    with pytest.raises(CheckpointError, match=r"step 3 .*available.*: 2, 4"):
        export_run(run, tmp_path / "third", step=3)
    with pytest.raises(FileExistsError, match="not empty"):
        export_run(run, tmp_path / "last")


def falling(completion, example):
    """A reward that falls after every third evaluation (8 prompts); the first of equals is best."""
    calls[0] += 1
    return 1.0 / (1 + (calls[0] - 1) // 24)


calls = [0]


@pytest.mark.parametrize(
    ("every", "steps", "best"),
    [
        pytest.param(1, [6, 4, 2], 2, id="evaluated-more-often-than-saved"),
        pytest.param(3, [6, 4], 6, id="only-the-last-step-is-evaluated-and-saved"),
        pytest.param(2, [6, 4, 2], 2, id="evaluated-and-saved-together"),
    ],
)
def test_the_best_is_a_checkpoint_that_can_be_exported(task, tmp_path, every, steps, best):
    """The initial model has the highest accuracy, but no checkpoint, so it cannot be exported."""
    calls[0] = 0
    config = tiny_config(
        task,
        tmp_path / "run",
        steps=6,
        method={"name": "sft"},
        checkpoint_every=2,
        reward="tests.faults.test_checkpoint:falling",
        export=True,
        eval={
            "data": {"prompts": str(task / "eval.jsonl")},
            "max_completion_length": 5,
            "every": every,
        },
    )
    run = train(config)
    assert [p.name for p in checkpoint.list_complete(run / "checkpoints")] == [
        f"step-{step:08d}" for step in reversed(steps)
    ]
    assert export_run(run, tmp_path / "best", step="best").name == f"step-{best:08d}"
    assert (
        checkpoint.read_progress(export_run(run, tmp_path / "by-number", step=best))["step"] == best
    )
    assert torch.equal(logits(tmp_path / "best"), logits(tmp_path / "by-number"))
    export_run(run, tmp_path / "last", step=6)
    assert torch.equal(logits(run / "model"), logits(tmp_path / "last"))


@pytest.mark.parametrize("killed", [False, True], ids=["straight", "killed-before-saving"])
def test_a_run_ends_with_its_best_weights(task, tmp_path, monkeypatch, killed):
    """Only steps that can be saved are evaluated; with reused rollouts these are 4, 6 and 8."""
    evaluation = {
        "data": {"prompts": str(task / "eval.jsonl")},
        "max_completion_length": 5,
        "every": 3,
    }
    config = tiny_config(
        task,
        tmp_path / "run",
        steps=99,
        demo_batch_size=3,  # two epochs of 12 are 8 steps, in which the learning rate falls
        method={"name": "sft-best", "epochs": 2},
        checkpoint_every=8,
        rollouts={"num_iterations": 2},
        reward="tests.faults.test_checkpoint:falling",
        eval=evaluation,
        export=True,
    )
    calls[0] = 0
    if killed:
        trainer = Trainer(config)
        trainer.save = interrupt
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
        assert trainer.step == 4
        assert evaluated_steps(config.out) == [0, 4]
        calls[0] = 0
    # two epochs need a checkpoint of step 8, and that of the best
    monkeypatch.setattr("gac.training.trainer.check_space", lambda *call: calls.append(call[2]))
    run = train(config)
    assert calls.pop() == 2
    assert evaluated_steps(run) == [0, 4, 6, 8]
    assert metrics(run)[-1]["lr"] == pytest.approx(1e-4)
    assert export_run(run, tmp_path / "best", step="best").name == "step-00000004"
    assert torch.equal(logits(run / "model"), logits(tmp_path / "best"))
    assert [
        Trainer(replace(config, eval=replace(config.eval, **change))).best.get("step")
        for change in ({}, {"every": 4}, {"max_completion_length": 4})
    ] == [4, 4, None]  # accuracies of another evaluation are not comparable


def interrupt():
    raise KeyboardInterrupt


def evaluated_steps(out):
    """The steps at which a run was evaluated."""
    return [
        json.loads(line)["step"] for line in (Path(out) / "eval.jsonl").read_text().splitlines()
    ]


def test_without_an_evaluation_there_is_no_best(task, tmp_path):
    run = train(tiny_config(task, tmp_path / "run", steps=2, eval={}))
    with pytest.raises(CheckpointError, match="best.* evaluated.* step"):
        export_run(run, tmp_path / "best", step="best")


def test_export_merges_adapters(task, tmp_path):
    pytest.importorskip("peft", reason="needs the extra `lora`")
    model = {"path": str(task / "init"), "random_init": True, "lora": {"rank": 2, "alpha": 64}}
    run = train(tiny_config(task, tmp_path / "run", model=model, export=True))
    trainer = Trainer(tiny_config(task, run, model=model))
    torch.testing.assert_close(
        trainer.model.eval()(torch.tensor([[3, 4, 5, 6]])).logits, logits(run / "model")
    )


def test_another_configuration_is_rejected_key_by_key(task, tmp_path):
    out = train(tiny_config(task, tmp_path / "run", steps=2))
    other = tiny_config(task, out, steps=2, seed=3, method={"name": "constant", "mu": 0.2})
    with pytest.raises(ConfigError) as error:
        Trainer(other)
    lines = str(error.value).splitlines()
    for expected in ("seed: 0 .* 3 now", "method.name: 'constant-alarm'"):
        assert any(re.search(expected, line) for line in lines)


def test_harmless_changes_are_allowed(task, tmp_path, caplog):
    moved = train(tiny_config(task, tmp_path / "run", steps=2)).rename(tmp_path / "moved")
    train(
        tiny_config(task, moved, steps=4, checkpoint_every=1, run_name="longer", micro_batch_size=3)
    )
    with caplog.at_level(logging.INFO):
        train(tiny_config(task, moved, steps=3, micro_batch_size=None, packing=True))
    assert [r["step"] for r in metrics(moved)] == [1, 2, 3, 4]
    assert "the run is finished: 4 of 3 steps; to train on, raise" in caplog.text


def test_run_directory_below_a_file_is_rejected_before_the_model_loads(task, tmp_path):
    (tmp_path / "file").write_text("")
    config = tiny_config(task, tmp_path / "file" / "run", model={"path": "/nowhere"})
    with pytest.raises(RunError, match="out=.*Not a directory.*another `out`"):
        Trainer(config)


def test_insufficient_disk_space_is_rejected_before_the_first_step(task, tmp_path, monkeypatch):
    from gac.training import startup as preflight

    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    for changes in ({"checkpoint_every": 2}, {"checkpoint_every": 1, "keep_checkpoints": 1}):
        with pytest.raises(RunError, match=r"2 checkpoints .* 0.0001 GB .*keep_checkpoints"):
            Trainer(tiny_config(task, tmp_path / "run", **changes))


def damage_of_one_rank(folder: Path) -> tuple[list[str], str, list[str]]:
    """The files of a checkpoint, the newest intact one, and what is left in the folder."""
    make_accelerator(ParallelConfig(timeout=20.0), (), str(folder))
    _, second = save(folder, 1, 2)
    if rank() == 1:
        flip(second / "__1_0.distcp")
        with pytest.raises(CheckpointError, match="__1_0.distcp does not match its checksum"):
            checkpoint.verify(second)
        (folder / ".writing-00000003").mkdir()
    gather(None)
    files = sorted(checkpoint.read_progress(second)["files"])
    gather(None)
    newest = checkpoint.newest_checkpoint(folder)
    with pytest.raises(OSError, match="further.absent"):  # if it is missing for any rank
        checkpoint.load(newest, *small(), {"absent": torch.zeros(1)} if rank() else None)
    if rank() == 1:  # without the other rank
        checkpoint.prune(folder, 1, best=None)  # deletes nothing
        assert (folder / ".writing-00000003").exists()
        assert checkpoint.read_tensors(
            newest, {"1.bias": checkpoint.model_tensors(newest)["1.bias"]}
        )["1.bias"].shape == (2,)
        checkpoint.load_weights(newest, small()[0])
    gather(None)
    checkpoint.prune(folder, 1, best=None)
    gather(None)
    return files, newest.name, sorted(path.name for path in folder.iterdir())


def test_all_ranks_fall_back_if_one_ranks_file_is_damaged(tmp_path):
    expected = (
        [".metadata", "__0_0.distcp", "__1_0.distcp"],
        "step-00000001",
        ["damaged-00000002", "step-00000001"],
    )
    assert ranks.run(damage_of_one_rank, tmp_path, ranks=2) == [expected] * 2
