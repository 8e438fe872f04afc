"""`gac init`: the folder that it creates runs without changes."""

from __future__ import annotations

import json
import subprocess
import sys

import yaml

from gac import cli


def test_the_path_of_a_new_user(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "first"]) == cli.OK
    subprocess.run([sys.executable, "first/reward.py"], check=True, timeout=60)
    short = ["steps=2", "eval.every=0", "checkpoint_every=1"]
    assert cli.main(["train", "first/run.yaml", "--set", *short]) == cli.OK
    assert cli.main(["report", "first"]) == cli.OK
    assert cli.main(["export", "first/run", "first/one", "--step", "1"]) == cli.OK
    page = (tmp_path / "first" / "run" / "report.html").read_text()
    entry = json.loads((tmp_path / "first" / "run" / "samples.jsonl").read_text())
    assert len(entry["prompts"][0]["responses"]) == 8
    assert "<h2>Samples</h2>" in page and entry["prompts"][0]["prompt"] in page
    capsys.readouterr()
    assert cli.main(["init", "first"]) == cli.USAGE
    assert "is not empty: choose a new folder" in capsys.readouterr().err


def test_a_real_model(tmp_path):
    assert cli.main(["init", str(tmp_path / "x"), "--model", "owner/name"]) == cli.OK
    config = yaml.safe_load((tmp_path / "x" / "run.yaml").read_text())
    assert config["model"] == {"path": "owner/name"}
    assert not (tmp_path / "x" / "model").exists()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["init", str(tmp_path / "file" / "x")]) == cli.USAGE
    assert "cannot be written" in capsys.readouterr().err
