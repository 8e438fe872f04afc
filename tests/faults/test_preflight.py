"""Checks before a run starts, with values computed by hand."""

import contextlib
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gac.errors import ConfigError, RunDirectoryError, RunError
from gac.training import startup as preflight
from gac.training.startup import check_budget, check_folder, check_same_run

UNCHANGED = """data.prompts demo_batch_size seed evaluation steps_more exporter rollouts
rollouts.num_prompts rollouts.vllms rollouts.correction method.name loss.kl_coef micro"""
CHANGED = """out run_name ignore_input_changes steps eval eval.every micro_batch_size
max_tokens_per_micro_batch packing checkpoint_every keep_checkpoints report_to export
guards.patience parallel.mode project optim.lr model.gradient_checkpointing rollouts.engine
rollouts.generation_batch_size rollouts.generation_batch_tokens rollouts.paged rollouts.vllm.urls
rollouts.log_samples_every rollouts.log_sample_prompts rollouts.print_samples"""


def test_a_folder_is_probed_and_left_as_it_was(tmp_path):
    out = tmp_path / "runs" / "one"
    for _ in range(2):
        check_folder(out)
        assert list(out.iterdir()) == []


def test_every_rank_must_see_the_files_of_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "rank", lambda: 1)
    message = f"out='{tmp_path}': rank 1 does not see rank 0's files: use a shared file system"
    with pytest.raises(RunDirectoryError, match=message):
        check_folder(tmp_path)
    (tmp_path / "probe").write_text("of rank 0")
    monkeypatch.setattr(preflight, "gather", lambda name: ["probe", name])
    check_folder(tmp_path)
    assert (tmp_path / "probe").exists()  # rank 0 deletes it


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("null byte")

    (tmp_path / "file").touch()
    out = tmp_path / "file" / "run"
    for reason in ("Not a directory", "null byte"):
        with pytest.raises(RunDirectoryError) as caught:
            check_folder(out)
        assert str(caught.value).startswith(
            f"out='{out}': the run directory is not writable ({reason}): choose another"
        )
        monkeypatch.setattr(preflight.Path, "mkdir", fail)


def test_a_checkpoint_needs_the_weights_and_two_moments(tmp_path, monkeypatch):
    """20 bfloat16 weights are trained, 10 float32 ones are not: 40 + 2 x 40 + 40 = 160 bytes."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(20).bfloat16()), torch.zeros(10)])
    model[1].requires_grad_(False)
    free = SimpleNamespace(free=2 * 160)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    preflight.check_space(tmp_path, model, checkpoints=2)
    free.free -= 1
    sizes = "2 checkpoints of this model need 3.2e-07 GB, but only 3.19e-07 GB are free"
    with pytest.raises(RunError, match=f"out='{tmp_path}': {sizes}"):
        preflight.check_space(tmp_path, model, checkpoints=2)


def test_budgets_by_hand():
    check_budget(None, 9, 4)
    check_budget(36, 9, 4)
    message = (
        "rollouts.generation_batch_tokens=35: the 4 rollouts of a prompt may have 36 tokens: use 36"
    )
    with pytest.raises(ConfigError, match=message):
        check_budget(35, 9, 4)


def nested(key: str, value: int) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def saved(config: dict, **changes) -> dict:
    # with another number, all runs of this version could no longer be resumed
    return {"format": preflight.FORMAT, "config": config, "ranks": 1, **changes}


@pytest.mark.parametrize("key", [*CHANGED.split(), *UNCHANGED.split()])
def test_keys_that_may_change_on_resume(key):
    now = nested(key, 2)
    check_same_run(saved(now), now, resize=False)
    message = f":\n  {key}: 1 in the checkpoint, 2 now"
    allowed = contextlib.nullcontext() if key in CHANGED.split() else pytest.raises(ConfigError)
    with allowed as caught:
        check_same_run(saved(nested(key, 1)), now, resize=True)
    assert caught is None or str(caught.value).endswith(message)


def test_differences_of_two_configurations_by_hand(caplog, monkeypatch):
    old = {"b": {"x": [1, 2], "y": {}}, "c": None, "a": 1, "run_name": "first"}
    check_same_run(saved(old), {"b": {"x": (1, 2), "y": {}}, "a": 1}, resize=False)
    check_same_run(saved({"path": "model/"}), {"path": "model"}, resize=False)
    for rank in (0, 2):  # only the first warns
        monkeypatch.setattr(preflight, "rank", lambda rank=rank: rank)
        check_same_run(saved({"optim": {"lr": 1}}), {"optim": {"lr": 2}}, resize=False)
    assert caplog.messages == ["resuming with optim.lr=2 instead of 1"]
    one, other = ({"method": {"name": name, name: 1}} for name in ("one", "other"))
    with pytest.raises(ConfigError, match="method.name: 'one' in the checkpoint, 'other' now$"):
        check_same_run(saved(one), other, resize=False)
    one, other = ({"rollouts": {"engine": name, "correction": name}} for name in ("vllm", "paged"))
    check_same_run(saved(one), other, resize=False)
    with pytest.raises(ConfigError) as caught:
        check_same_run(saved(old), {"b": {"x": [1, 3], "y": {"z": 0}}, "run_name": 7}, resize=False)
    assert str(caught.value).splitlines()[1:] == [
        "  a: 1 in the checkpoint, 'not set' now",
        "  b.x: [1, 2] in the checkpoint, [1, 3] now",
        "  b.y: {} in the checkpoint, 'not set' now",
        "  b.y.z: 'not set' in the checkpoint, 0 now",
    ]


def test_ranks_and_versions_of_a_checkpoint():
    for changes in ({"ranks": 2}, {}):
        check_same_run(saved({}, **changes), {}, resize=True)
    with pytest.raises(ConfigError, match=r"by 2 processes but 1 are running.* Start 2 processes"):
        check_same_run(saved({}, ranks=2), {}, resize=False)
    for version in (None, 2, preflight.FORMAT + 1):
        with pytest.raises(ConfigError, match="another version of gac"):
            check_same_run(saved({}, format=version), {}, resize=True)
