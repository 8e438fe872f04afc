"""`gac study` without training: its runs, statistics, files and page."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gac import cli
from gac.config import dump, save, to_yaml
from gac.errors import ConfigError
from gac.report.plots import COLORS
from gac.study import page, runs
from gac.study.command import arm_config, parse_arm, read_study
from gac.study.results import interval, mean, row_cells, summary
from tests.tiny import tiny_config, write_tiny

FINALS = {"low": [0.1, 0.2, 0.3], "dr": [0.5, 0.6, 0.7], "high": [0.9, None, 1.0]}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Run `gac study` with the accuracies in FINALS; return its configurations and study.json."""

    def result(config):
        accuracy = FINALS[config.run_name][config.seed]
        if accuracy is None:
            return None
        return {"final": {"accuracy": accuracy}, "seconds": 1.0, "tokens": 100}

    def run(*arguments: str):
        calls = []

        def run_all(configs, jobs, discard):
            calls.append((configs, jobs, discard))
            return {c.out: "failed: x" for c in configs if result(c) is None}

        monkeypatch.setattr("gac.study.command.run_all", run_all)
        monkeypatch.setattr("gac.study.command.result", result)
        reports = []
        monkeypatch.setattr(
            "gac.study.command.write_report",
            lambda r, out: reports.append(r) or out / "report.html",
        )
        path = tmp_path / "run.yaml"
        save(tiny_config(write_tiny(tmp_path), tmp_path / "out", steps=2), path)
        methods = {"low": "constant:mu=0.1", "dr": "dr-grpo", "high": "constant:mu=0.9"}
        path.write_text(path.read_text() + to_yaml({"methods": methods}))
        code = cli.main(["study", str(path), *arguments])
        text = (tmp_path / "out" / "study.json").read_text()
        assert text.startswith('{\n "setting": {\n  "')
        return (
            code,
            *calls,
            json.loads(text),
            reports,
            (tmp_path / "out" / "study.html").read_text(),
        )

    return run


def test_a_study_runs_all_labels_seed_by_seed(study) -> None:
    """An interrupted study has compared all methods on the first seeds."""
    code, (configs, jobs, discard), *_ = study()
    assert (code, jobs, discard) == (1, 1, False)  # one run failed
    expected = [(seed, label) for seed in range(3) for label in FINALS]
    assert [(config.seed, config.run_name) for config in configs] == expected
    assert [config.method.mu for config in configs[::3]] == [0.1] * 3


def test_the_file_of_a_study(study, tmp_path) -> None:
    _, _, saved, *_ = study()
    assert saved["setting"] == {
        "config": "run.yaml",
        "set": [],
        "methods": ["low", "dr", "high"],
        "seeds": 3,
        "steps": dict.fromkeys(FINALS, 2),
        "baseline": "low",
        "command": f"gac study {tmp_path}/run.yaml --methods low dr high --seeds 3",
    }
    assert {label: row["final"] for label, row in saved["methods"].items()} == FINALS
    assert list(saved["failed"]) == [f"{tmp_path}/out/high-1"]


def test_the_report_of_a_study_has_the_finished_runs(study) -> None:
    _, (configs, *_), _, reports, _ = study()
    finished = [c for c in configs if c.run_name != "high" or c.seed != 1]
    assert [path.name for path in reports[0]] == [Path(c.out).name for c in finished]


HEADER = ["method", "seeds", "accuracy", "95%", "difference", "95%", "p", "d"]


def test_the_page_of_a_study(study, tmp_path) -> None:
    *_, html = study()
    for part in (
        '<a href="report.html">',
        "<title>Study: run.yaml</title>",
        '<th scope="col">method</th>',
        '<th scope="col">against the baseline</th>',
        "<td class=best>95.0</td>",
        f"<li>{tmp_path}/out/high-1: failed: x</li>",
        "The baseline is low. Accuracy is",
        "\nbaseline: low\n",
        "Differences whose interval excludes 0: ahead of low: dr, high.",
        "data:image/svg+xml",
    ):
        assert part in html
    assert html.count("class=best") == 1
    assert html.count('<th scope="col">') == len(HEADER)


def test_the_table_that_a_study_prints(study, tmp_path, capsys) -> None:
    study()
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(" ".join(HEADER))
    assert "+40.0 [+40.0, +40.0]" in printed
    out = f"{tmp_path}/out/study"
    assert printed.endswith(f"Results: {out}.json Report: {out}.html")


def test_options_of_a_study(study, tmp_path) -> None:
    options = ["--seeds", "1", "--baseline", "dr", "--jobs", "2", "--discard"]
    options += ["--set", "steps=5", "--set", "demo_batch_size=9"]
    code, (configs, jobs, discard), saved, _, html = study("--methods", "high", "dr@grpo", *options)
    assert (code, jobs, discard) == (0, 2, True)
    assert [(config.run_name, config.steps, config.seed) for config in configs] == [
        ("high", 5, 0),
        ("dr", 5, 0),
    ]
    assert saved["methods"]["high"]["against_baseline"]["difference"] == pytest.approx(0.4)
    command = f"gac study {tmp_path}/run.yaml --methods high dr@grpo --seeds 1 --baseline dr"
    setting = saved["setting"]
    assert setting["command"] == f"{command} --set steps=5 demo_batch_size=9"
    assert (setting["methods"], setting["set"]) == (
        ["high", "dr@grpo"],
        ["steps=5", "demo_batch_size=9"],
    )
    assert setting["seeds"] == 1
    assert "The baseline is dr. " in html


def test_a_study_without_results(study, monkeypatch) -> None:
    monkeypatch.setitem(FINALS, "high", [None])
    code, _, saved, reports, html = study("--methods", "high", "--seeds", "1")
    assert (code, reports) == (1, [])
    assert "Training curves" not in html
    assert saved["methods"]["high"]["mean"] is None


def test_methods_of_the_file(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("steps: 2\nmethods: {1: gac, sft: {name: sft}}\n")
    assert read_study(path) == ({"steps": 2}, {"1": "gac", "sft": {"name": "sft"}})
    path.write_text("steps: 2\nmethods: [gac, sft]\n")
    with pytest.raises(ConfigError, match=r"methods: expected `label: method` lines, got \['gac'"):
        read_study(path)
    path.write_text("steps: 2\nmethods:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["study", path.name]) == cli.USAGE
    assert "--methods: missing, and a.yaml has no key `methods`" in capsys.readouterr().err
    assert sys.path[-1] == str(tmp_path)  # where the runs find rewards
    with pytest.raises(ConfigError, match=r"eval.data.prompts: missing; a study"):
        arm_config({"steps": 2}, parse_arm("gac"), 0)


def rows(**intervals):
    against = {name: {"against_baseline": {"ci95": ci95}} for name, ci95 in intervals.items()}
    return {"setting": {"baseline": "base"}, "methods": against}


def test_headline_names_the_methods_whose_interval_excludes_zero() -> None:
    study = rows(base=[0.1, 0.2], up=[0.1, 0.2], zero=[0.0, 0.2], down=[-0.2, -0.1], one=None)
    expected = "ahead of base: up; behind base: down."
    assert page.headline(study) == f"Differences whose interval excludes 0: {expected}"
    assert page.headline(rows(base=None, a=[-0.2, 0.0])).startswith("No method differs from base")


def test_cells_and_dots_of_a_study(monkeypatch) -> None:
    methods = summary({"a": [0.0, 0.2, None], "b": [0.1, 0.4, 0.9]}, "a")
    assert row_cells(methods["a"]) == [
        "2",
        "10.0",
        "[0.0, 100.0]",
        "+0.0",
        "[+0.0, +0.0]",
        "1.000",
        "+0.00",
    ]
    assert row_cells(methods["b"])[:5] == ["3", "46.7", "[0.0, 100.0]", "+15.0", "[-48.5, +78.5]"]
    assert row_cells(methods["b"])[5:] == ["0.205", "+1.08"]  # 1 - 2 atan(3) / pi
    axes = Figure().subplots()
    monkeypatch.setattr(
        page, "interval_figure", lambda names, height, label, draw: draw(axes) or (names, height)
    )
    assert page.draw(methods, "a") == (["a", "b"], pytest.approx(1.78))  # 0.34 per method
    dots = [line for line in axes.lines if line.get_marker() == "."]
    assert [line.get_xydata().tolist() for line in dots] == [
        [[0, 0], [20, 0]],
        [[10, -1], [40, -1], [90, -1]],
    ]
    assert axes.dataLim.ymax == 0
    assert [(line.get_color(), line.get_alpha(), line.get_markersize()) for line in dots] == [
        (COLORS[1], 0.3, 7),
        (COLORS[0], 0.3, 7),
    ]
    others = [line.get_xydata() for line in axes.lines if line.get_marker() != "."]
    assert [ends.round().tolist() for ends in others] == [
        [[10, 0]],
        [[0, 0], [100, 0]],
        [[47, -1]],
        [[0, -1], [100, -1]],
    ]
    assert row_cells(summary({"a": [0.5], "b": [None]}, "a")["b"]) == ["0", *"------"]
    assert mean([0.0, 0.0, 1.0]) == 0.333333
    assert interval([1 / 3] * 2) == [0.333333] * 2


CHANGES: list[dict[str, Any]] = [
    {"steps": 3},
    {"added": 1},
    {"demo_batch_size": None},
    {"eval": {}},
    *({key: {}} for key in ("optim", "method", "data", "model", "reward", "loss")),
    {"seed": None},
]


def test_a_result_of_other_settings_is_refused(task, tmp_path) -> None:
    config, path = tiny_config(task, tmp_path, steps=2), tmp_path / "result.json"
    for damaged in ("", "{}"):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match="result.json: damaged; delete that folder"):
            runs.result(config)
    settings = runs._settings(dump(config))
    for change in CHANGES:
        changed = (settings | change).items()
        path.write_text(json.dumps({"config": {k: v for k, v in changed if v is not None}}))
        with pytest.raises(
            ConfigError, match=f"finished run with a different {next(iter(change))};"
        ):
            runs.result(config)
    renamed = {"config": settings | {"run_name": "x"}}  # no effect
    path.write_text(json.dumps(renamed))
    assert runs.result(config) == renamed


@pytest.mark.parametrize(("method", "step"), [("sft-best", 1), ("sft", 3)])
def test_the_final_evaluation_is_the_best_or_the_last(tmp_path, method, step) -> None:
    config = tiny_config(write_tiny(tmp_path), tmp_path, method=method)
    rows = [{"step": i, "accuracy": x} for i, x in enumerate((0.9, 0.5, None, 0.4))]
    steps = [{"seconds": 1.5, "tokens": 10}, {"seconds": 2.0, "tokens": 12}]
    for name, lines in (("eval", rows), ("metrics", steps)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert runs._summary(config) == {"final": rows[step], "seconds": 3.5, "tokens": 22}


def test_the_reason_of_a_failure_is_the_last_line_of_a_log_unless_the_run_was_killed(tmp_path):
    log = tmp_path / "log.txt"
    assert runs._fault(log, 1) == f"failed: its process exited with 1; see {log}"
    log.write_bytes(b"step 1\nOSError: \xff" + b"x" * 400 + b"\n \n")
    assert runs._fault(log, 1) == f"failed: OSError: \ufffd{290 * 'x'}; see {log}"
    assert runs._fault(log, -9) == f"failed: its process exited with -9; see {log}"
