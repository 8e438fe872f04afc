"""The study's tables for known inputs: comparison with the best constant in hindsight, collapsed
runs, missing runs, and resuming.
"""

from __future__ import annotations

import json

import pytest

from gac.config import ConfigError
from tools import scenario_results as results
from tools import scenario_study as study
from tools.scenario_study import FIRST, MAIN, STUDIES, known_finals

GATE = STUDIES["gate"]
SEEDS = len(GATE.seeds)


def finals_of(tmp_path, **arms):
    """Results with only `arms` filled in for the main scenarios; each arm maps to the accuracies of
    its first seeds.
    """
    finals = known_finals(GATE, tmp_path / "none")
    for scenario in MAIN:
        for arm, values in arms.items():
            finals[scenario][arm.replace("_", "-")][: len(values)] = values
    return finals


@pytest.fixture
def finals(tmp_path):
    constants = {f"mu-{mu}": [0.3, 0.4, 0.5] for mu in (0.1, 0.3, 0.7, 0.9)}
    return finals_of(
        tmp_path, **constants, **{"mu-0.5": [0.5, 0.5, 0.8, 0.9]}, gate_z=[0.6, 0.6, 0.2]
    )


def test_an_arm_is_compared_on_common_seeds_with_the_best_constant(finals):
    found = results.against_hindsight(finals, "base", "gate-z")
    assert found["seeds"] == 3 and found["best"] == "mu-0.5" and found["collapsed"] == 1
    assert found["gap"] == pytest.approx(1.4 / 3 - 0.6)
    low, high = found["ci95"]
    assert -0.6 - 1e-9 <= low < found["gap"] < high <= 0.1 + 1e-9
    assert results.against_hindsight(finals, "late", "gate-z") is None
    assert results.against_hindsight(finals, "base", "chord") is None
    single = results.against_single(finals, MAIN, "gate-z")
    assert single["best"] == "mu-0.5" and single["gap"] == pytest.approx(1.4 / 3 - 0.6)
    assert results.against_single(finals, GATE.scenarios, "gate-z") is None
    assert results.groups(GATE, finals) == {"the first four scenarios": MAIN}


def test_the_page_says_what_was_found_and_what_was_not_run(finals, tmp_path):
    text = results.page("gate", {"finals": finals, "code": "abc"})
    assert "base no (-13.3 [" in text and "mean: 4." in text
    assert "`late`, `second`: mu-0.1, mu-0.3," in text
    assert f"`noisy`: mu-0.1 ({SEEDS - 3} seeds)" in text and f"gac, gate-z ({SEEDS - 3} s" in text
    results.draw(GATE, finals, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 1000


def test_the_brief_table_takes_whole_seeds_only(tmp_path):
    arms = {arm: [0.25, 0.75, 0.5] for arm in FIRST}
    whole = finals_of(tmp_path, **{**arms, "gate-z": [0.5, 1.0]})
    text = results.brief(GATE, whole)
    assert "over 2 of 10 seeds" in text and text.count("\n| `") == len(FIRST)
    assert "| `chord` | 50.0 | 50.0 | 50.0 | 50.0 | 50.0 | [25.0, 75.0] |" in text
    assert "| `gate-z` | 75.0 |" in text


def test_a_study_judges_its_own_arm_on_its_own_seeds(tmp_path):
    second = STUDIES["confirmation"]
    finals = known_finals(second, tmp_path)
    for scenario in MAIN:
        for arm, value in {**dict.fromkeys(results.FIXED, 0.5), "gate-cosine": 0.6}.items():
            finals[scenario][arm][:] = [value] * len(second.seeds)
    text = results.page("confirmation", {"finals": finals, "code": "abc"})
    assert "base yes (+10.0 [+10.0, +10.0] against mu-0.1, 10 seeds)" in text
    assert "excludes 0: yes" in text and "sketch-cosine" in text and "gate-z" not in text
    grid = dict.fromkeys(second.seeds)
    assert not set(grid) & set(GATE.seeds) and set(second.arms) < {*GATE.arms, "sketch-cosine"}


def test_the_study_goes_on_from_the_file_without_folders(finals, tmp_path, monkeypatch, capsys):
    path, page, choice = (tmp_path / n for n in (GATE.file, "study.md", "choose_mu.md"))
    choice.write_text(results.MARK)
    page.write_text(f"# Protocol\n\n{results.MARK}old")
    held = {"setting": GATE.setting, "finals": finals, "code": "abc", "bases": {}}
    path.write_text(json.dumps(held))
    results.write("gate", tmp_path / "nothing", None, tmp_path)
    assert json.loads(path.read_text()) == held
    assert page.read_text().startswith(f"# Protocol\n\n{results.MARK}\n76 of ")
    assert "No seed has run" in choice.read_text()
    assert (tmp_path / "study.png").stat().st_size > 1000
    # only runs that are missing from the file are started
    ran = []
    grid = [(c, a, s, (c, a, s)) for c in GATE.scenarios for a in FIRST for s in range(SEEDS)]
    monkeypatch.setattr(study, "known_finals", lambda given: known_finals(given, tmp_path))
    monkeypatch.setattr(study, "cells", lambda given, out: grid)
    monkeypatch.setattr(study, "run_all", lambda configs, *_, **__: ran.extend(configs))
    assert study.main(["gate", "--out", str(tmp_path)]) == 0
    assert len(ran) == len(grid) - 4 * (3 * 5 + 4) and ("base", "mu-0.5", 3) not in ran
    path.write_text(json.dumps({**held, "setting": {"steps": 1}}))
    with pytest.raises(ConfigError, match="holds another grid"):
        known_finals(GATE, tmp_path)
    path.unlink()
    page.write_text("no mark")
    with pytest.raises(ConfigError, match="has no line"):
        results.write("gate", tmp_path / "nothing", None, tmp_path)


def test_no_study_shares_a_seed_and_each_keeps_its_scenarios():
    seeds = [seed for held in STUDIES.values() for seed in held.seeds]
    assert len(seeds) == len(set(seeds))
    assert {name: len(held.scenarios) for name, held in STUDIES.items()} == {
        "gate": 7,
        "confirmation": 7,
        "alarm": 9,
    }
    alarm = STUDIES["alarm"]
    found = results.groups(alarm, known_finals(alarm, results.DOCS / "none"))
    assert found == {"the first seven scenarios": alarm.phases[0][0]}
