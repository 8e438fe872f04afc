"""docs/extend.md, run from an empty folder: a method of the user's own."""

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
            (tmp_path / text.split("\n", 1)[0].removeprefix("# ")).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PROGRAM = """
import contextlib, io, json, sys
from gac.cli import main
results = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(command)
    results.append((code, printed.getvalue()))
with open("results.json", "w") as file:
    json.dump(results, file)
"""


def gac(*lines: str) -> tuple[dict[str, str], str]:
    """Run commands in one new process, with fewer steps; returns what each prints, and stderr."""
    commands = []
    for line in lines:
        _, action, *rest = shlex.split(line)
        commands.append([action, *rest, *(["--set", *SHORT[action]] if action in SHORT else [])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(Path("results.json").read_text())
    assert [code for code, _ in results] == [0] * len(lines), (results, done.stderr)
    return {line: text for line, (_, text) in zip(lines, results, strict=True)}, done.stderr


def environment(**changes: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}site",
        "OMP_NUM_THREADS": "1",
        **changes,
    }


@pytest.mark.full(reason="trains two studies")
def test_the_page_runs_as_written(folder):
    before, after = [text for kind, text in FENCE.findall(SECTION) if kind == "sh"]
    install, *after = after.splitlines()
    outputs, _ = gac(*before.splitlines())
    assert install == "pip install ."
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", "site"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "."],
        env=environment(),
        check=True,
        timeout=300,
    )
    outputs |= gac(*after)[0]
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
    outputs, warnings = gac("gac methods")
    assert "cannot load bad = my_method:Absent" in warnings
    listed = re.findall(r"^  (\S+) ", outputs["gac methods"], re.MULTILINE)
    assert listed[-1] == "threshold"
    assert listed.count("sft") == 1
    assert "bad" not in listed
