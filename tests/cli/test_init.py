"""`gac init`: the folder that it creates runs without changes."""

import json
import subprocess
import sys

import yaml
from transformers import AutoTokenizer

from gac import cli
from gac.config import load
from gac.train_config import TrainConfig


def test_a_new_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "first"]) == cli.OK
    settings = yaml.safe_load((tmp_path / "first" / "run.yaml").read_text())
    assert settings["model"] == {"path": "first/model"}
    assert (
        settings["steps"],
        settings["optim"],
    ) == (30, {"lr": 3e-3})
    assert "# This one is tiny and untrained\n" in (tmp_path / "first" / "run.yaml").read_text()
    tokenizer = AutoTokenizer.from_pretrained("first/model")
    assert len(tokenizer) == 98
    assert tokenizer.decode(range(3)) == "<pad><eos><unk>"
    ids = tokenizer(" aZ ~1")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == " aZ ~1"
    subprocess.run([sys.executable, "first/reward.py"], check=True, timeout=60)
    capsys.readouterr()
    assert cli.main(["init", "first"]) == cli.USAGE
    assert "is not empty: choose a new folder" in capsys.readouterr().err


def test_a_real_model(tmp_path):
    (tmp_path / "x").mkdir()  # an empty folder is as good as a new one
    assert cli.main(["init", str(tmp_path / "x"), "--model", "owner/name"]) == cli.OK
    config = yaml.safe_load((tmp_path / "x" / "run.yaml").read_text())
    assert config["model"] == {"path": "owner/name"}
    assert not (tmp_path / "x" / "model").exists()
    assert (config["steps"], config["optim"]) == (100, {"lr": 1e-6})
    text = (tmp_path / "x" / "run.yaml").read_text()
    assert f"gac train {tmp_path}/x/run.yaml\n" in text
    assert "tiny" not in text
    assert load(TrainConfig, config).data.prompts == f"{tmp_path}/x/data/train.jsonl"
    evals, train = (
        [json.loads(line) for line in (tmp_path / "x" / "data" / name).read_text().splitlines()]
        for name in ("eval.jsonl", "train.jsonl")
    )
    assert (len(evals), len(train)) == (100, 400)
    assert len({row["prompt"] for row in [*evals, *train]}) == 500
    for row in [*evals, *train]:
        assert row["answer"] == "".join(sorted(row["prompt"][5:8]))
    assert all(row["solution"] == row["answer"] for row in train)


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["init", str(tmp_path / "file" / "x")]) == cli.USAGE
    assert "cannot be written" in capsys.readouterr().err
