"""The study's tables for known results: comparisons, collapsed runs, missing runs, resuming."""

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
    """Results of the main scenarios only; `arms` maps to the accuracies of the first seeds."""
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
    gap = results.against_hindsight(finals, "base", "gate-z")
    assert gap["seeds"] == 3 and gap["best"] == "mu-0.5" and gap["collapsed"] == 1
    assert gap["gap"] == pytest.approx(1.4 / 3 - 0.6)
    low, high = gap["ci95"]
    assert -0.6 - 1e-9 <= low < gap["gap"] < high <= 0.1 + 1e-9
    assert results.against_hindsight(finals, "late", "gate-z") is None
    assert results.against_hindsight(finals, "base", "chord") is None
    single = results.against_single(finals, MAIN, "gate-z")
    assert single["best"] == "mu-0.5" and single["gap"] == pytest.approx(1.4 / 3 - 0.6)
    assert results.against_single(finals, GATE.scenarios, "gate-z") is None
    assert results.groups(GATE, finals) == {"the first four scenarios": MAIN}


def test_page_lists_results_and_missing_runs(finals, tmp_path):
    text = results.page("gate", {"finals": finals, "code": "abc"})
    assert "base no (-13.3 [" in text and "mean: 4." in text
    assert "`late`, `second`: mu-0.1, mu-0.3," in text
    assert f"`noisy`: mu-0.1 ({SEEDS - 3} seeds)" in text and f"gac, gate-z ({SEEDS - 3} s" in text
    results.draw(GATE, finals, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 1000


def test_summary_lists_regrets_over_all_scenarios(tmp_path):
    fourth = STUDIES["fourth"]
    finals = known_finals(fourth, tmp_path)
    for scenario in fourth.scenarios:
        for arm, value in {**dict.fromkeys(results.FIXED, 0.5), "guarded": 0.6}.items():
            finals[scenario][arm][:2] = [value, value]
    finals["base"]["guarded"][:2] = [0.1, 0.2]
    finals["turn"]["mu-0.3"][:2] = [0.7, 0.7]
    text = results.summary_section(fourth, finals)
    # mean: (11 * 60 + 60 + 15) / 13; regret: (11 * 10 - 10 - 35) / 13; the best constant's mean is
    # (12 * 50 + 70) / 13 = 51.5
    row = "| `guarded` | 56.5 | +5.0 [+4.6, +5.4] | +5.0 | -35.0 (`base`) | 2 | 2 |"
    assert row in text and "| `mu-0.3` | 51.5 |  | +0.0 | +0.0 (`base`) | 0 | 2 |" in text
    assert "`constant-alarm`" not in text  # it has no run


def test_fourth_study_judges_margins_places_and_equal_time(tmp_path):
    fourth = STUDIES["fourth"]
    finals = known_finals(fourth, tmp_path)
    arms = {**dict.fromkeys(results.FIXED, 0.5), "constant-alarm": 0.485, "gac": 0.49}
    for scenario in fourth.scenarios:
        for arm, value in arms.items():
            finals[scenario][arm][:2] = [value, value]
    finals["turn"]["constant-alarm"][:2] = [0.471, 0.471]
    finals["burst"]["constant-alarm"][:2] = [0.479, 0.479]
    by_step = {"30": 0.1, "60": 0.2, "90": 0.3, "120": 0.5}
    course = {arm: {"0": by_step, "1": by_step} for arm in arms}
    seconds = {**{arm: {"0": 1.0, "1": 2.0} for arm in arms}, "gac": {"0": 1.2, "1": 2.6}}
    saved = {"finals": finals, "code": "abc", "course": course, "seconds": seconds}
    text = results.page("fourth", saved)
    assert "at most 2 points below" in text and "(in `turn`, 3 points)" in text
    assert "base yes (-1.5" in text and "turn yes (-2.9" in text and "burst no (-2.1" in text
    assert "higher average than `constant-alarm`: `mu-0.1` by +" in text and "`gac` by" in text
    assert "| `gac` | 2 | 1.250 [1.200, 1.300] | 30.0 at step 90; best constant 50.0 |" in text
    assert "| `constant-alarm` | 2 | 1.000 [1.000, 1.000] | - |" in text


def test_each_study_tests_its_own_arm_on_its_own_seeds(tmp_path):
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


def test_study_resumes_from_its_file_without_run_folders(finals, tmp_path, monkeypatch, capsys):
    path, page = tmp_path / GATE.file, tmp_path / "study.md"
    page.write_text(f"# Protocol\n\n{results.MARK}previous results")
    saved = {"setting": GATE.setting, "finals": finals, "code": "abc", "bases": {}}
    saved |= {"course": {}, "seconds": {}}
    path.write_text(json.dumps(saved))
    results.write("gate", tmp_path / "nothing", None, docs=tmp_path)
    assert json.loads(path.read_text()) == saved
    assert page.read_text().startswith(f"# Protocol\n\n{results.MARK}\n")
    assert " 76 of " in page.read_text() and "previous" not in page.read_text()
    assert (tmp_path / "study.png").stat().st_size > 1000
    # only runs that are missing from the file are started
    ran = []
    grid = [(c, a, s, (c, a, s)) for c in GATE.scenarios for a in FIRST for s in range(SEEDS)]
    monkeypatch.setattr(study, "known_finals", lambda chosen: known_finals(chosen, tmp_path))
    monkeypatch.setattr(study, "cells", lambda chosen, out: grid)
    monkeypatch.setattr(study, "run_all", lambda configs, *_, **__: ran.extend(configs))
    assert study.main(["gate", "--out", str(tmp_path)]) == 0
    assert len(ran) == len(grid) - 4 * (3 * 5 + 4) and ("base", "mu-0.5", 3) not in ran
    path.write_text(json.dumps({**saved, "setting": {"steps": 1}}))
    with pytest.raises(ConfigError, match="different grid; move it"):
        known_finals(GATE, tmp_path)
    path.unlink()
    page.write_text("no mark")
    with pytest.raises(ConfigError, match="no line .*scenario_results.*; add it"):
        results.write("gate", tmp_path / "nothing", None, docs=tmp_path)


def test_studies_have_disjoint_seeds_and_fixed_scenarios():
    seeds = [seed for study_grid in STUDIES.values() for seed in study_grid.seeds]
    assert len(seeds) == len(set(seeds))
    assert {name: len(study_grid.scenarios) for name, study_grid in STUDIES.items()} == {
        "gate": 7,
        "confirmation": 7,
        "alarm": 9,
        "fourth": 13,
    }
    alarm = STUDIES["alarm"]
    groups = results.groups(alarm, known_finals(alarm, results.DOCS / "none"))
    assert groups == {"the first seven scenarios": alarm.phases[0][0]}
