"""A run resumes only with the inputs that it started with, and from intact files."""

import json
import shutil
import sys

import pytest
from safetensors import SafetensorError

from gac.config import load, save
from gac.demo.task import make_tokenizer
from gac.errors import CheckpointError, ConfigError, RunError
from gac.rewards import build_reward
from gac.train_config import TrainConfig
from gac.training import export
from gac.training import startup as fingerprint
from gac.training.export import export_run
from gac.training.record import Logbook
from gac.training.trainer import Trainer
from tests.tiny import tiny_config, write_tiny

REWARD = "def reward(completion, example):\n    return float(len(completion) {})\n"


@pytest.fixture(scope="module")
def half_run(tmp_path_factory):
    """A run of two steps, with its own data and reward file."""
    folder = write_tiny(tmp_path_factory.mktemp("task"))
    (folder / "rw.py").write_text(REWARD.format("> 2"))
    Trainer(config(folder, steps=2)).run()
    return folder


def config(folder, steps=4, **changes):
    changes = {"reward": f"{folder}/rw.py:reward", "eval": {}, **changes}
    return tiny_config(folder, folder / "run", steps=steps, **changes)


def change_data(folder):
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    (folder / "prompts.jsonl").write_text(
        "\n".join([json.dumps(json.loads(lines[0]) | {"answer": "0"}), *lines[1:]])
    )


def change_model(folder):
    path = folder / "init" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-5}))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (change_data, "prompts"),
        (change_model, "model"),
        (lambda folder: (folder / "rw.py").write_text(REWARD.format("> 3")), "reward"),
    ],
    ids=["prompts", "model", "reward"],
)
def test_a_changed_input_is_refused(half_run, change, name, monkeypatch):
    backup = {p: p.read_bytes() for p in half_run.rglob("*") if p.is_file()}
    try:
        change(half_run)
        for module in [m for m in sys.modules if m.startswith("reward_rw_")]:
            monkeypatch.delitem(sys.modules, module)
        with pytest.raises(ConfigError, match=f"the {name} changed .*ignore_input_changes=true"):
            Trainer(config(half_run))
        assert Trainer(config(half_run, ignore_input_changes=True)).step == 2
    finally:
        for path, content in backup.items():
            path.write_bytes(content)


def test_export_verifies_the_checkpoint(half_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(half_run / "run", run)
    (file,) = (run / "checkpoints" / "step-00000002").glob("__0_0.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum.*another checkpoint"):
        export_run(run, tmp_path / "out", 2)
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left here")]
)
def test_a_full_disk_during_export_leaves_the_checkpoint(half_run, tmp_path, monkeypatch, error):
    def full(config, path, folder, size):
        if isinstance(error, OSError):
            folder.mkdir()
        raise error

    run = tmp_path / "run"
    shutil.copytree(half_run / "run", run)
    save(config(half_run, steps=2), run / "config.yaml")
    monkeypatch.setattr(export, "_save_weights", full)
    with pytest.raises(RunError, match=r"export .* \(No space left .*step-00000002 is complete$"):
        export_run(run, tmp_path / "out")
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert export_run(run, tmp_path / "out").name == "step-00000002"
    for name, error in (("config.yaml", FileExistsError), ("config.yaml/out", ConfigError)):
        with pytest.raises(error, match=f"^OUT='{run / name}' (is not empty|cannot be written)"):
            export_run(run, run / name)


def test_a_torn_line_costs_only_itself(tmp_path):
    book = Logbook(tmp_path / "metrics.jsonl")
    book.path.write_bytes(b'7\n{"mu": 1}\n\xff')  # not ours, and a broken disk
    book.append({"step": 1})
    with book.path.open("a") as file:
        file.write('{"step": 2, "kl"')  # a kill, or a full disk
    book.append({"step": 2})
    book.append({"step": 3})
    assert [row["step"] for row in book.read()] == [1, 2, 3]
    with book.path.open("a") as file:
        file.write('{"step": 4')
    book.truncate(2)
    assert book.path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_fingerprint_covers_the_names_the_sizes_and_a_megabyte_at_each_end(tmp_path):
    def content(name, data):
        (tmp_path / name).write_bytes(data)
        parts = list(fingerprint._model(tmp_path))
        (tmp_path / name).unlink()
        return b"|".join(parts)

    zeros = bytes((1 << 20) - 1)
    first, other = (content("a.bin", b"%b1%b1%b" % (zeros, x, zeros)) for x in (b"--", b"++"))
    others = [
        content("b.bin", zeros + b"1--1" + zeros),
        content("a.bin", zeros + b"2--1" + zeros),
        content("a.bin", zeros + b"1--2" + zeros),
        content("a.bin", zeros + b"1---1" + zeros),
        content("a.safetensors", zeros + b"1--1" + zeros),
        content("a.bin", b"1"),
        content("config.json", b"1"),
        content("README.md", b"1"),
    ]
    assert first == other
    assert len({first, *others}) == 9
    assert others[-1] == b""


def test_a_fingerprint_covers_the_functions_and_classes_of_rewards(tmp_path):
    files = [tmp_path / "rw_1.py", tmp_path / "rw_2.py"]
    for number, file in enumerate(files):
        file.write_text(REWARD.format(f"> {number}"))
    assert list(
        fingerprint._files(
            build_reward({"sum": [{"reward": f"{file}:reward", "weight": 0.5} for file in files]})
        )
    ) == [file.read_bytes() for file in files]
    # a class of the user's, and one of ours
    for name, own in (("tests.tiny:CountedDigits", 1), ("exact", 0)):
        assert len([*fingerprint._files(build_reward(name))]) == own


def test_a_fingerprint_covers_the_tokenizer_and_the_functions_of_the_configuration(tmp_path):
    (tmp_path / "own.py").write_text("def own(): ...\n")
    own = f"{tmp_path / 'own.py'}:own"
    config = load(TrainConfig, {"data": {"order": own}, "rollouts": {"function": own}})
    tokenizers, reward = [make_tokenizer(c) for c in ("01", "10", "01")], build_reward("exact")
    tokenizers[2].chat_template = "x"
    now, *others = (fingerprint.fingerprint(config, t, {}, reward) for t in tokenizers)
    assert len({inputs["tokenizer"] for inputs in (now, *others)}) == 3
    # with another hash, the inputs of a run of this version would count as changed
    assert now["data.order"] == now["rollouts.function"] == "e8d4913776986184"


def test_only_inputs_that_the_checkpoint_knows_are_compared():
    now = {"data": "a", "model": "b", "reward": "c"}
    for saved in ({}, now, {"data": "a", "removed": "d"}):
        fingerprint.check_fingerprint(saved, now, False)
    changed = {"data": "x", "model": "b", "reward": "x"}
    fingerprint.check_fingerprint(changed, now, True)
    with pytest.raises(ConfigError, match="the data and the reward changed since"):
        fingerprint.check_fingerprint(changed, now, False)
