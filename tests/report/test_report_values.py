"""The numbers and texts of a report, against values computed by hand."""

import json
import math
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gac.demo.task import write_rows
from gac.report import page, plots, results_table
from gac.report.ending import ending
from gac.report.groups import Group, differences, group_runs
from gac.report.page import read_samples, samples
from gac.report.reading import read_run, time_shares
from gac.report.statistics import band, smooth
from gac.report.table import Column, window_of, write_cell


def write_run(
    path: Path, config: dict[str, Any], columns: dict[str, list[Any]], evals: list[Any]
) -> Path:
    """A run folder; `columns`: the values of each field of metrics.jsonl, from step 1 on."""
    path.mkdir(parents=True)
    if config:
        (path / "config.yaml").write_text(json.dumps(config))
    write_rows(
        path / "metrics.jsonl",
        [
            {"step": step, **dict(zip(columns, values, strict=True))}
            for step, values in enumerate(zip(*columns.values(), strict=True), 1)
        ],
    )
    write_rows(path / "eval.jsonl", evals)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds of gac, of which the second is unfinished, and a shorter run of sft."""
    root = tmp_path_factory.mktemp("runs")
    gac: dict[str, Any] = {"steps": 7, "model": {"path": "tiny"}, "method": {"name": "gac"}}
    gac["controller"] = {"update_every": 2, "kl_target": 0.5}
    first = {
        "kl": [0, 1, 0.5, 0, 0, 0, None],
        "mu": [0.5, 0.9, 0.52, 0.1, 0.6, 0.2, 0.6],
        "completions/mean_length": [4, 6, 4, 6, 4, 6, 5],
        "tokens": [1000 * step for step in range(1, 8)],
        "seconds": [30] * 7,
        "sampling_seconds": [*[14] * 6, None],
        "reward_seconds": [3] * 7,
    }
    second = {
        "kl": [2] * 5,
        "mu": [0.3] * 5,
        "completions/mean_length": [3] * 5,
        "tokens": [400] * 5,
    }
    # ended early, and resumed with more steps
    second |= {"seconds": [12] * 5, "ended": [None, 1, None, None, None]}
    paths = [
        write_run(
            root / "gac-0",
            gac | {"seed": 0, "run_name": "gac-seed0"},
            first,
            [
                {"step": 0, "accuracy": 0.1, "accuracy/+": 0.25},
                {"step": 4, "accuracy": 0.6, "accuracy/+": 0.875},
                {"step": 7, "accuracy": 0.4, "accuracy/+": 0.75, "ci95": [0.3, 0.6]},
            ],
        ),
        write_run(
            root / "gac-1",
            gac | {"seed": 1, "run_name": "gac-seed1"},
            second,
            [{"step": 0, "accuracy": 0.1}, {"step": 5, "accuracy": 0.8, "accuracy/+": 0.25}],
        ),
        write_run(
            root / "sft",
            {"steps": 9, "model": {"path": "tiny"}, "method": "sft", "run_name": "sft"},
            {"tokens": [1_234_567] * 3, "ended": [None, None, 1]},
            [{"step": 1, "accuracy": 0.5}],
        ),
    ]
    with (paths[1] / "eval.jsonl").open("a") as file:
        file.write('{"step": 6, "acc')
    with (paths[1] / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "note": "\xff", "mu')
    for age, path in enumerate(paths):
        for file in path.glob("*.jsonl"):
            modified = datetime(2020, 3 - age, 4, 5, 6).timestamp()
            os.utime(file, (modified, modified))
    return paths


@pytest.fixture(scope="module")
def groups(runs: list[Path]) -> list[Group]:
    return group_runs([read_run(path) for path in runs])


def test_tables(runs: list[Path]) -> None:
    """The second accuracy of gac's first run is its best, the third its last.

    KL area: 1.5 and 8. mu changes by 0.02, 0.08 and 0 over the
    three windows of two steps of the first run, and never in the second.
    """
    cells = [
        [line[:10].strip(), *line[10:].replace(" ± ", "±").split("  ")]
        for line in results_table(runs).splitlines()
    ]
    table = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    assert table[0][1:] == [
        *("seeds", "steps", "start accuracy %", "final accuracy %", "best accuracy %", "final + %")
    ]
    assert table[2] == [
        "gac",
        "2",
        "5 to 7 of 7",
        "10.0±0.0",
        "60.0±28.3",
        "70.0±14.1",
        "50.0±35.4",
    ]
    assert table[3] == ["sft", "1", "3", "–", "50.0", "50.0", "–"]
    assert table[7] == [
        *("gac", "2", "5 to 7 of 7", "4.75±4.60", "16.7±23.6", "0.429±0.606", "15±18", "2.2±1.8")
    ]
    assert table[8] == ["sft", "1", "3", "–", "–", "–", "3,704", "–"]


def test_the_headline_names_the_best_group(groups: list[Group]) -> None:
    context = window_of([run for group in groups for run in group.runs])
    assert context == 2
    assert page.headline(groups, context) == (
        "Highest final accuracy: gac with 60.0 ± 28.3%, 10.0 points above sft (50.0%). "
        "Without several seeds for each, a small gap is not evidence."
    )
    assert page.headline(groups[:1], context) == (
        "Final accuracy: 60.0 ± 28.3%. The initial model has 10.0%."
    )


def test_the_window_is_10_without_an_interval() -> None:
    assert window_of([]) == 10


def test_the_facts_of_the_runs(groups: list[Group], tmp_path: Path) -> None:
    assert page._facts(groups)[:-1] == [
        ("Runs", "3"),
        ("Seeds", "0, 1"),
        ("Model", "tiny"),
        ("Last trained", "2020-03-04 05:06"),
    ]
    other = group_runs([read_run(one_run(tmp_path / "other", 0.5, model="other", seed=3))])
    assert page._facts(other)[:3] == [("Runs", "1"), ("Seed", "3"), ("Model", "other")]
    different_models = [name for name, _ in page._facts([*groups, *other])]
    assert different_models == ["Runs", "Seeds", "Last trained", "Generated"]
    bare = page._facts(group_runs([read_run(one_run(tmp_path / "bare", 0.5))]))
    assert bare[1] == ("Seed", "not recorded")
    assert bare[2][0] == "Last trained"


def test_the_facts_name_the_installed_versions(groups: list[Group], monkeypatch: Any) -> None:
    monkeypatch.setattr(page, "PACKAGES", ("no-such-package", *page.PACKAGES[:2]))
    generated, versions = page._facts(groups)[-1]
    assert generated == "Generated"
    assert versions.endswith(f", torch {torch.__version__}")
    assert ", python 3." in versions
    assert ", gac-kernels 0." in versions
    assert "such" not in versions


def test_the_note_explains_spreads_and_different_lengths(groups: list[Group]) -> None:
    note = page._note(groups[1:])
    assert note.startswith("± is the standard deviation over seeds, brackets are the 95% interval")
    assert page._note(groups[:1]) == (
        f"{note}Runs have different lengths; areas and sums of shorter runs cover fewer steps. "
    )


def test_the_title_names_the_groups(groups: list[Group]) -> None:
    assert page._title(groups[:1]) == "Training report: gac"
    assert page._title(groups) == "Comparison: gac and sft"
    assert page._title([*groups, groups[0]]) == "Comparison: gac, sft and gac"


def test_settings_that_differ_are_listed(groups: list[Group]) -> None:
    assert page._differences(groups) == [
        ("steps", ["7", "9"]),
        ("method.name", ["gac", "–"]),
        ("controller.update_every", ["2", "–"]),
        ("controller.kl_target", ["0.5", "–"]),
        ("run_name", ["gac-seed*", "sft"]),
        ("method", ["–", "sft"]),
    ]


def test_each_run_has_its_state_and_configuration(runs: list[Path], groups: list[Group]) -> None:
    rows = page._runs(groups)
    labels = [("gac", ", seed 0"), ("gac", ", seed 1"), ("sft", "")]
    assert [(row["label"], row["seed"]) for row in rows] == labels
    assert [row["path"] for row in rows] == [str(path) for path in runs]
    assert [row["state"] for row in rows] == [
        "7 steps; 30 s per step: sampling 40%, rewards 10%, training 50%",
        "5 steps of 7 (unfinished or still running); 2 unreadable line(s) skipped; "
        "12 s per step: sampling 0%, rewards 0%, training 100%",
        "3 steps",
    ]
    assert rows[2]["config"].splitlines()[:3] == ["steps: 9", "model:", "  path: tiny"]


def accuracies(groups: list[Group]) -> list[dict[str, Any]]:
    """The rows of the page's first table."""
    return page._table(page.tables(groups, window_of([]))[0], groups)["rows"]


def marked(rows: list[dict[str, Any]]) -> list[list[bool]]:
    """Which cells are marked as the best."""
    return [[cell["best"] for cell in row["cells"]] for row in rows]


def test_a_table_has_a_row_for_each_group(groups: list[Group]) -> None:
    table = page._table(page.tables(groups, window_of([]))[0], groups)
    assert table["columns"][:3] == ["Accuracy", "seeds", "steps"]
    assert [(row["label"], row["seeds"], row["progress"]) for row in table["rows"]] == [
        ("gac", 2, "5 to 7 of 7"),
        ("sft", 1, "3"),
    ]
    assert table["rows"][0]["cells"][1] == {"mean": "60.0", "spread": "± 28.3", "best": True}
    assert table["rows"][1]["cells"][1] == {"mean": "50.0", "spread": "", "best": False}


def test_colors_and_dashes_repeat_after_the_last(groups: list[Group]) -> None:
    rows = accuracies(groups * 5)
    dashes = ["none", "12 4", "4 3", "14 4 3 4", "20 6", "8 3 2 3 2 3"]
    assert [row["dashes"] for row in rows] == dashes + dashes[:4]
    assert [row["color"] for row in rows] == [*plots.COLORS, *plots.COLORS[:2]]


def test_only_the_best_accuracies_are_marked(groups: list[Group], tmp_path: Path) -> None:
    best = [[False, True, True, True], [False] * 4]
    assert marked(accuracies(groups)) == best
    assert marked(accuracies(groups[::-1])) == best[::-1]
    assert marked(accuracies(groups[:1])) == [[False] * 4]  # nothing to compare with
    _, *others = page.tables(groups, window_of([]))
    assert [table.title for table in others] == ["Stability and cost", "Training health"]
    for table in others:
        assert not any(map(any, marked(page._table(table, groups)["rows"])))
    negative = group_runs(
        [read_run(one_run(tmp_path / f"{x}", x, run_name=f"{x}")) for x in (-1.0, -0.5)]
    )
    assert marked(accuracies(negative)) == [[False] * 2, [True] * 2]


def one_run(path: Path, accuracy: float, /, **config: Any) -> Path:
    return write_run(path, config, {}, [{"step": 3, "accuracy": accuracy}])


def test_the_gap_is_compared_with_the_spread_of_both_experiments(tmp_path: Path) -> None:
    """Standard deviations of 3 and 4 points, 5 combined."""
    half = 1 / math.sqrt(2)
    for gap, relation in ((0.06, "more than"), (0.045, "within")):
        paths = [
            one_run(
                tmp_path / f"{gap}{name}{seed}", mean + sign * sd * half, seed=seed, run_name=name
            )
            for name, mean, sd in (
                ("low", 0.5, 0.03),
                ("high", 0.5 + gap, 0.04),
                ("third", 0.3, 0.05),
            )
            for seed, sign in enumerate((-1, 1))
        ]
        text = page.headline(group_runs([read_run(path) for path in paths]), window_of([]))
        assert f"high with {50 + 100 * gap:.1f} ± 4.0%, {100 * gap:.1f} points above low (" in text
        assert f"That is {relation} the spread over seeds" in text
        assert text.endswith(" is 5.0.")
        for some in (paths[1:], paths[:3]):  # one run of the lower, of the higher
            text = page.headline(group_runs([read_run(path) for path in some]), window_of([]))
            assert "Without several seeds for each" in text
            assert "spread" not in text
    # runs with another model, twice with the same seed
    others = [one_run(tmp_path / i, 0.7, seed=0, model={"path": "x"}) for i in "ab"]
    groups = group_runs([read_run(path) for path in (*paths, *others)])
    text, table = page.headline(groups, 1), results_table([*paths, *others])
    assert text.startswith("These runs differ in model.path")
    assert "Without several seeds" in text
    assert groups[-1].size == 1
    assert "These runs differ in model.path" in table


def labels_of(tmp_path: Path, settings: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """The label of each group, and its number of runs."""
    paths = [one_run(tmp_path / f"run{i}", 0.5, **values) for i, values in enumerate(settings)]
    return [(group.label, len(group.runs)) for group in group_runs(map(read_run, paths))]


def test_a_label_is_the_run_name_without_the_seed(tmp_path: Path) -> None:
    names = {
        "other": 1,
        "seed7": 7,
        "x/seed_8": 8,
        "y seed71": 7,  # another number
        "z-seed1": 1,
        "grpo-2": 2,
        "mu-0.3": 3,
    }
    settings = [{"run_name": n, "seed": s, "v": i} for i, (n, s) in enumerate(names.items())]
    found = [label for label, _ in labels_of(tmp_path, settings)]
    assert found == ["other", "seed7", "x", "y seed71", "z", "grpo", "mu-0.3"]


def test_runs_whose_settings_differ_only_in_their_seed_are_one_group(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"run_name": "s", "u": 1, "v": 2, "seed": 1},
        {"v": 2, "run_name": "s", "u": 1, "seed": 2},
        {"run_name": "x", "seed": 7, "d": "seed7 seed-7 seed71 ok"},
        {"run_name": "x", "seed": 8, "d": "seed8 seed-8 seed71 ok"},
        {"run_name": "x", "seed": 71, "d": "seed71 seed-71 seed71 ok"},
    ]
    assert labels_of(tmp_path, settings) == [("s", 2), ("x (run2)", 2), ("x (run4)", 1)]


def test_differences_have_the_values_of_each_group(tmp_path: Path) -> None:
    settings = {"first": {"same": 1, "nested": {"b": 2, "seed": 7}}, "second": {"same": 1, "c": 4}}
    paths = [one_run(tmp_path / name, 0.5, **values) for name, values in settings.items()]
    assert differences(group_runs(map(read_run, paths))) == {
        "nested.b": [2, None],
        "nested.seed": [7, None],
        "c": [None, 4],
    }


def test_only_numbers_are_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"seed": "x", "steps": "y", "eval": 3}, {}, [])
    write_rows(
        path / "metrics.jsonl",
        [
            {"step": 1, "ok": True, "a": 2},
            [1],
            {"step": None},
            {"step": math.nan},
            {"step": "2"},
            {"step": 2, "a": "text", "b": 3},
        ],
    )
    run = read_run(path)
    assert (run.seed, run.steps_planned, run.tasks, run.unreadable) == (None, None, [], 4)
    assert run.metrics["step"].tolist() == [1, 2]
    assert set(run.metrics) == {"step", "a", "b"}
    np.testing.assert_array_equal(run.metrics["a"], [2, math.nan])
    other = write_run(
        tmp_path / "other",
        {
            "x": {"update_every": 5},
            "update_every": "none",
            "eval": {"tasks": {"a": {}, "b": {}}},
        },
        {},
        [{"step": 0, "accuracy/b": 0.5}],
    )
    assert read_run(other).tasks == ["b"]
    assert window_of([run, read_run(other)]) == 5


def test_smallest_and_largest_cells() -> None:
    column = Column("x", "x")
    assert write_cell((-1.234e-8, math.nan), column) == "-0.000000"
    assert write_cell((-12.34, 0.06), column) == "-12.3 ± 0.1"
    assert write_cell((123456.7, math.nan), column) == "123,457"
    assert smooth(np.array([1.0, 5.0]), 0.5).tolist() == [1, 5]
    steps, mean, low, high = band(
        [(np.array([2.0, 6]), np.array([1.0, 5])), (np.array([4.0, 8]), np.array([0.0, 4]))]
    )
    assert (steps.tolist(), mean.tolist()) == ([4, 6], [1.5, 3.5])
    assert (low.tolist(), high.tolist()) == ([0, 2], [3, 5])


def test_the_page_of_two_groups(groups: list[Group]) -> None:
    text = page.render(groups, 2, {})
    assert text.startswith("<!doctype html>\n<html")
    assert '<td class="best">60.0 <span class="sd">± 28.3</span></td>' in text
    assert "controller intervals (2 steps each)" in text
    assert "<li><b>Runs</b> 3</li>" in text
    assert "<td>7</td><td>9</td>" in text
    assert 'stroke-dasharray="none"/></svg>gac</th><td>2</td><td>5 to 7 of 7</td>' in text
    assert "<h2>Samples</h2>" not in text
    assert "Not recorded: Reward, " in text


def test_the_page_shows_samples_by_step(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {}, {"a": [1]}, [])
    write_rows(
        path / "samples.jsonl",
        [
            {
                "step": s,
                "prompts": [
                    {
                        "prompt": "1+1=",
                        "completions": [
                            {
                                "text": "2!",
                                "turns": [["2", True], ["!", False]],
                                "reward": 0.12345,
                                "truncated": False,
                            },
                            {"text": "3<", "reward": None, "truncated": True},
                        ],
                        "demonstration": "two",
                    }
                ],
            }
            for s in (1, 2)
        ],
    )
    text = page.render(group_runs([read_run(path)]), window_of([]), {})
    turns = '2<span class="note" title="no loss">!</span>'
    assert text.count(f'<td>0.123</td><td class="text">{turns}</td>') == 2
    assert text.count('<td>dropped</td><td class="text">3&lt; (cut off)</td>') == 2
    assert text.count('<td>demonstration</td><td class="text">two</td>') == 2
    columns = text.split('<details open><summary><b>run</b></summary><div class="two">')[1]
    assert columns.index("<div><h3>Step 1</h3>") < columns.index("<div><h3>Step 2</h3>")


def test_samples_show_the_first_and_the_last_step(tmp_path: Path) -> None:
    """A resumed run has written step 30 twice."""
    path = write_run(tmp_path / "run", {"seed": 0}, {"a": [1]}, [])
    write_rows(
        path / "samples.jsonl", [{"step": s, "i": i} for i, s in enumerate([30, 10, 20, 30])]
    )
    with (path / "samples.jsonl").open("a") as file:
        file.write('[1]\n{"i": 7}\n{"step": 6')
    empty, one = (write_run(tmp_path / name, {"seed": 1}, {}, []) for name in ("empty", "one"))
    (empty / "config.yaml").unlink()
    write_rows(one / "samples.jsonl", [{"step": 1}])
    assert read_samples(path) == [{"step": 10, "i": 1}, {"step": 30, "i": 3}]
    assert (read_samples(one), read_samples(empty)) == ([{"step": 1}], [])
    groups = group_runs([read_run(folder) for folder in (empty, path, one)])
    assert samples(groups) == [{"label": "run", "entries": read_samples(path)}]
    assert time_shares(groups[0].runs[0]) == time_shares(groups[1].runs[0]) == ""


@pytest.mark.parametrize(
    ("rewards", "own", "verdict"),
    [
        ([0.9] * 5, "other", None),
        ([0.9] * 3 + [0.71], None, "yes; reward 71.0% on the training prompts at the end"),
        (
            [0.9] * 16 + [0.5] * 3 + [1.3],
            None,
            "no sign of it; reward 70.0% on the training prompts at the end",
        ),
        ([None] * 5, None, None),
    ],
)
def test_the_last_lines_of_a_run(
    tmp_path: Path, rewards: list[Any], own: str | None, verdict: str | None
) -> None:
    evals = [
        {"step": step, "accuracy": mean, "ci95": [mean - 0.1, mean + 0.1], "prompts": 50}
        for step, mean in ((0, 0.1), (3, 0.6), (5, 0.5))
    ]
    path = write_run(
        tmp_path / "a run",
        {"eval": {"reward": own}},
        {
            "seconds": [30 for _ in rewards],
            "sampling_seconds": [15 for _ in rewards],
            "reward_mean": rewards,
        },
        [None, {"step": 0}, *evals],
    )
    assert ending(path).splitlines() == [
        "accuracy: 10.0% [0.0, 20.0] before, 60.0% [50.0, 70.0] best (step 3), "
        "50.0% [40.0, 60.0] after (50 prompts)",
        f"time: {len(rewards) / 2} min in {len(rewards)} steps; "
        "30 s per step: sampling 50%, rewards 0%, training 50%",
        f"run: {path}",
        *([f"overfitting: {verdict}"] if verdict else []),
        f"next: gac report '{path}'",
    ]
    write_rows(path / "eval.jsonl", [{"step": 0, "accuracy": 0.5, "prompts": 1}])
    (path / "model").mkdir()
    assert [line for line in ending(path).splitlines() if line[0] in "amo"] == [
        "accuracy: 50.0% before, 50.0% best (step 0), 50.0% after (1 prompts)",
        f"model: {path / 'model'}",
    ]


def test_the_rewards_of_stored_pairs_say_nothing_about_overfitting(tmp_path: Path) -> None:
    evals = [{"step": i, "accuracy": 0.1, "ci95": [0.0, 0.2], "prompts": 50} for i in (0, 5)]
    columns = {"seconds": [1.0] * 5, "reward_mean": [0.5] * 5}
    settings = {"rollouts": {"function": "gac.rollouts.stored:stored_pairs"}}
    text = ending(write_run(tmp_path / "run", settings, columns, evals))
    assert "overfitting" not in text


def test_a_run_without_any_reward_says_so(tmp_path: Path) -> None:
    """Nothing can be said about overfitting."""
    evals = [{"step": i, "accuracy": 0.0, "ci95": [0.0, 0.1], "prompts": 50} for i in (0, 5)]
    path = write_run(tmp_path / "run", {}, {"seconds": [1.0] * 5, "reward_mean": [0.0] * 5}, evals)
    text = ending(path)
    assert "overfitting" not in text
    assert "reward 0.0% on the training prompts at the end: nothing was rewarded; read" in text
