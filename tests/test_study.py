"""The study program on two methods and a few steps: what it runs, keeps and writes."""

from __future__ import annotations

import json

import pytest

from gac.demo import run
from tools import methods_study as study
from tools.methods_table import page


@pytest.mark.slow
def test_study_runs_once_and_summarises_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "GATE", (0.0, 1.0))
    monkeypatch.setattr(study, "GRID", (0.3,))
    arguments = [
        "--out", str(tmp_path / "runs"), "--methods", "constant", "dft", "luffy", "--seeds", "2",
        "--steps", "2", "--base-steps", "3", "--jobs", "2", "--results", str(tmp_path / "r.json"),
    ]  # fmt: skip
    assert study.main(arguments) == 0
    first = json.loads((tmp_path / "r.json").read_text())
    rows = {row["name"]: row for row in first["rows"]}
    assert list(rows) == ["constant", "dft", "luffy", "best constant in hindsight (mu=0.3)"]
    assert rows["luffy"]["demos"] == "prompt" and rows["constant"]["demos"] == "apart"
    finals = [
        json.loads((tmp_path / f"runs/luffy-{seed}/eval.jsonl").read_text().splitlines()[-1])
        for seed in (0, 1)
    ]
    mean = sum(final["accuracy"] for final in finals) / 2
    assert rows["luffy"]["accuracy"][0] == pytest.approx(mean, abs=1e-4)
    assert f"| `luffy` | same | {100 * mean:.1f} ± " in page(first)

    capsys.readouterr()
    assert study.main(arguments) == 0
    assert " of " not in capsys.readouterr().out  # nothing was left to run
    assert json.loads((tmp_path / "r.json").read_text()) == first
