"""The study of all methods on the demo task."""

import json

import pytest

from gac.demo import run, task
from research import methods_study as study


def test_study_runs_once_and_summarizes_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "BASE_ACCURACY", (0.0, 1.0))
    monkeypatch.setattr(study, "GRID", (0.3,))
    arguments = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "r.json")]
    arguments += ["--methods", "constant", "luffy", "--seeds", "2", "--steps", "2"]
    arguments += ["--base-steps", "3", "--jobs", "2"]
    assert study.main(arguments) == 0
    first = json.loads((tmp_path / "r.json").read_text())
    rows = {row["name"]: row for row in first["rows"]}
    assert list(rows) == ["constant", "luffy", "best constant in hindsight (mu=0.3)"]
    assert rows["luffy"]["demos"] == "prompt"
    assert rows["constant"]["demos"] == "separate"
    finals = [
        json.loads((tmp_path / f"runs/luffy-{seed}/eval.jsonl").read_text().splitlines()[-1])
        for seed in (0, 1)
    ]
    mean = sum(final["accuracy"] for final in finals) / 2
    assert rows["luffy"]["accuracy"][0] == pytest.approx(mean, abs=1e-4)
    assert f"| `luffy` | same | {100 * mean:.1f} ± " in study.page(first)

    capsys.readouterr()
    assert study.main(arguments) == 0
    assert " of " not in capsys.readouterr().out  # nothing was left to run
    assert json.loads((tmp_path / "r.json").read_text()) == first


def test_every_method_and_ablation_has_a_valid_configuration(tmp_path):
    """The plan of the whole study, of which the test above trains two methods."""
    task.write_task(tmp_path / "task", seed=0)
    runs = dict(study.plan(tmp_path, tmp_path / "task" / "init", study.NAMES, 1, 8))
    assert set(study.NAMES) <= set(runs)
    assert all(len(configs) == 1 for configs in runs.values())


def test_the_page_is_that_of_the_stored_results():
    stored = json.loads(study.RESULTS.read_text())
    assert study.PAGE.read_text() == study.page(stored)


def test_merge_keeps_other_rows_of_the_same_setting(tmp_path):
    path, setting = tmp_path / "r.json", {"steps": 2, "seeds": 1}
    hindsight = [{"name": f"{study.HINDSIGHT} (mu={mu})"} for mu in (0.1, 0.3)]
    old = [{"name": "sft", "x": 1}, {"name": "gac", "x": 1}, hindsight[0]]
    path.write_text(json.dumps({"setting": setting, "rows": old}))
    new = [{"name": "gac", "x": 2}, {"name": "grpo"}, hindsight[1]]
    assert study.merged(new, path, setting) == [old[0], new[1], new[0], hindsight[1]]
    with pytest.raises(ValueError, match="same steps"):
        study.merged(new, path, {**setting, "steps": 3})
