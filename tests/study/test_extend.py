"""docs/extend.md, run from an empty folder: a method of the user's own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "extend.md").read_text().split("## A method")[1].split("\n## ")[0]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORT = {
    "train": ["steps=3", "checkpoint_every=1", "eval.every=0"],
    "study": ["steps=3", "eval.every=0", "export=false"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files of the page in an empty folder."""
    for kind, text in FENCE.findall(SECTION):
        if kind in ("python", "toml"):
            name = text.split("\n", 1)[0].removeprefix("# ")
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(line: str) -> list[str]:
    """The command, with packages installed in a folder and with fewer steps."""
    program, action, *rest = shlex.split(line)
    if program == "pip":
        local = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", "site"]
        return [sys.executable, "-m", "pip", action, *local, *rest]
    short = ["--set", *SHORT[action]] if action in SHORT else []
    return [sys.executable, "-m", "gac.cli", action, *rest, *short]


def environment(**changes: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}site",
        "OMP_NUM_THREADS": "1",
        **changes,
    }


@pytest.mark.slow(reason="trains")
def test_the_page_runs_as_written(folder):
    outputs = {}
    for line in "".join(text for kind, text in FENCE.findall(SECTION) if kind == "sh").splitlines():
        done = subprocess.run(
            command(line), env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        outputs[line] = done.stdout
    assert "method.level: float = 0.3" in outputs["gac methods my_method:Threshold"]
    assert re.search(r"^  threshold +SFT first; mostly RL", outputs["gac methods"], re.MULTILINE)
    assert "name: my_method:Threshold\n" in (folder / "first/run/config.yaml").read_text()
    study = json.loads((folder / "first/run/study.json").read_text())
    assert list(study["methods"]) == ["constant", "my_method:Threshold:level=0.2"]
    assert all(None not in row["final"] for row in study["methods"].values())


def test_a_broken_package_does_not_stop_the_others(folder):
    info = folder / "site" / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: broken\nVersion: 1.0\n")
    points = "threshold = my_method:Threshold\nbad = my_method:Absent\nsft = my_method:Threshold\n"
    (info / "entry_points.txt").write_text(f"[gac.methods]\n{points}")
    done = subprocess.run(
        command("gac methods"), env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "cannot load bad = my_method:Absent" in done.stderr
    listed = re.findall(r"^  (\S+) ", done.stdout, re.MULTILINE)
    assert listed[-1] == "threshold" and listed.count("sft") == 1 and "bad" not in listed
