"""The tuning driver: the grids of the paper's table 18, and what it chooses and reports."""

import json
from pathlib import Path

import pytest

from gac.config import dump
from gac.errors import ConfigError
from gac.methods import METHODS
from research import tuning
from research.tuning import GRIDS, candidates, table, tune
from tests.tiny import tiny_config, write_tiny


def test_the_grids_are_those_of_table_18_and_fields_of_the_methods():
    assert [len(candidates(method)) for method in GRIDS] == [3, 3, 3, 1, 3]
    for method in GRIDS:
        for candidate in candidates(method):
            METHODS[method](**candidate.fields)
    assert candidates("pcgrad")[0].label == "pcgrad-threshold--0.2"


def test_the_best_validation_accuracy_is_chosen_and_tested_with_other_seeds(tmp_path, monkeypatch):
    """Accuracies by hand: radius 0.5 is best on the validation rows, and another on the test."""
    task = write_tiny(tmp_path)
    ran = []

    def run_all(configs, jobs):
        ran.extend(configs)
        return {}

    def result(config):
        radius, name = config.method.radius, Path(config.eval.data.prompts).stem
        score = {0.2: 0.1, 0.5: 0.4, 0.8: 0.3}[radius] if name == "valid" else radius
        return {"final": {"accuracy": score + 0.01 * config.seed}}

    monkeypatch.setattr(tuning, "run_all", run_all)
    monkeypatch.setattr(tuning, "result", result)
    data = dump(tiny_config(task, tmp_path / "out", steps=2))
    valid, test = str(task / "valid.jsonl"), str(task / "eval.jsonl")
    results = tune(data, ["cagrad"], valid, ["steps=3"], test=test, seeds=2)
    rows = results["candidates"]
    assert [row["mean"] for row in rows] == pytest.approx([0.105, 0.405, 0.305])
    assert [row["chosen"] for row in rows] == [False, True, False]
    assert rows[1]["test"] == pytest.approx([0.52, 0.53])
    assert [config.seed for config in ran] == [0, 1] * 3 + [2, 3]
    assert {config.steps for config in ran} == {3}
    assert results["keys"]["validation"] == valid
    assert results["commit"]
    assert "| **`cagrad`** | **radius=0.5** | **40.5** | 52.5 |" in table(results)
    with pytest.raises(ConfigError, match="--validation"):
        tune(data, ["cagrad"], test, test=test)


def test_the_command_trains_and_writes_its_results(tmp_path):
    task = write_tiny(tmp_path)
    config = tiny_config(task, tmp_path / "out", steps=1, demo_batch_size=2)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(dump(config)))
    rows = (task / "eval.jsonl").read_text()
    (task / "valid.jsonl").write_text(rows)
    arguments = [str(path), "--validation", str(task / "valid.jsonl"), "--methods", "mgda"]
    assert tuning.main([*arguments, "--set", "export=false"]) == 0
    (row,) = json.loads((tmp_path / "out" / "tuning.json").read_text())["candidates"]
    assert row["chosen"]
    assert 0 <= row["mean"] <= 1
