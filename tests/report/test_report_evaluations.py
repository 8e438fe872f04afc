"""Evaluations in the report: extra tasks evaluated during training, and results of `gac eval`."""

import math
from pathlib import Path

import pytest

from gac import cli
from gac.config import load
from gac.errors import ConfigError
from gac.evaluation.config import EvalConfig
from gac.evaluation.suite import run_suite
from gac.report import plots, write_report
from gac.report.groups import group_runs
from gac.report.page import headline
from gac.report.plots import evaluation_panels, has_data
from gac.report.reading import read_run
from gac.report.table import summarize, tables, window_of
from gac.training.trainer import train
from tests.report import test_report_values
from tests.tiny import tiny_config


def write_run(path: Path, evaluations: list[dict], tasks: list[str]) -> Path:
    return test_report_values.write_run(
        path,
        {"method": {"name": path.name}, "eval": {"tasks": {name: {} for name in tasks}}},
        {"x": [1.0] * 10},
        evaluations,
    )


ROWS = [
    {
        "step": step,
        "accuracy": main,
        "accuracy/easy": main,
        "accuracy/logic": logic,
        "accuracy/logic/three_objects": logic,
        "accuracy/facts": 0.5,
    }
    for step, main, logic in ((0, 0.2, 0.8), (10, 0.6, 0.4))
]


def test_each_extra_task_has_its_own_panel_and_caption(tmp_path):
    run = read_run(write_run(tmp_path / "gac", ROWS, ["logic", "facts"]))
    assert run.tasks == ["logic", "facts"]
    groups = group_runs([run])
    panels = {panel.column: panel for panel in evaluation_panels(groups)}
    assert list(panels) == [name for name in ROWS[0] if name != "step"]
    assert panels["accuracy/easy"].caption.startswith("The same for")
    assert "task “logic”" in panels["accuracy/logic"].caption
    assert "split “three_objects”" in panels["accuracy/logic/three_objects"].caption
    assert all(has_data(panel, groups) for panel in panels.values())


def test_table_shows_start_and_final_accuracy_of_extra_tasks(tmp_path):
    runs = [read_run(write_run(tmp_path / "gac", ROWS, ["logic", "facts"]))]
    accuracy, extra, *_ = tables(group_runs(runs), window_of(runs))
    assert [c.key for c in accuracy.columns] == ["start", "final", "best", "accuracy/easy"]
    cells = {c.key: cell[0] for c, cell in zip(extra.columns, extra.cells[0], strict=True)}
    assert [(column.title, column.scale, column.decimals) for column in extra.columns][:2] == [
        ("start logic %", 100, 1),
        ("final logic %", 100, 1),
    ]
    assert cells == {
        "start/logic": 0.8,
        "accuracy/logic": 0.4,
        "start/facts": 0.5,
        "accuracy/facts": 0.5,
    }


def test_run_with_only_extra_tasks(tmp_path, no_images):
    runs = [
        read_run(
            write_run(
                tmp_path / "gac",
                [{k: v for k, v in row.items() if k in ("step", "accuracy/logic")} for row in ROWS],
                ["logic"],
            )
        )
    ]
    groups, context = group_runs(runs), window_of(runs)
    assert math.isnan(summarize(runs[0], context)["final"])
    assert headline(groups, context) == "Final accuracy on logic: 40.0%."
    assert [panel.column for panel in evaluation_panels(groups)] == ["accuracy/logic"]
    # if another run has a final accuracy, this one counts as not evaluated
    runs.append(read_run(write_run(tmp_path / "sft", ROWS, [])))
    assert headline(group_runs(runs), context) == "Final accuracy: 60.0%."
    assert (
        "Held-out accuracy: logic over optimizer steps"
        in write_report([tmp_path / "gac"], tmp_path).read_text()
    )


def test_extra_tasks_are_recorded_and_reported(task, tmp_path, no_images):
    data = {"prompts": str(task / "eval.jsonl")}
    run = train(
        tiny_config(
            task,
            tmp_path / "run",
            steps=1,
            eval={
                "data": data,
                "max_completion_length": 5,
                "tasks": {
                    "other": {
                        "data": data,
                        "max_completion_length": 3,
                        "split_field": "op",
                        "reward": "tests.tiny:digit_reward",
                    }
                },
            },
        )
    )
    assert read_run(run).splits == ["other", "other/+", "other/-"]
    page = write_report([run], tmp_path).read_text()
    assert "start other %" in page
    assert "task “other”" in page


# --- results of gac eval


@pytest.fixture(scope="module")
def results(task, tmp_path_factory) -> Path:
    """Two folders of results, the second compared with the first."""
    out, data = tmp_path_factory.mktemp("evals"), {"prompts": str(task / "eval.jsonl")}
    tasks = {
        "digits": {"data": data, "max_completion_length": 5, "split_field": "op"},
        "<often>": {"data": data, "samples": 2, "temperature": 1.0, "max_completion_length": 3},
    }
    for name, seed, against in (("base", 0, None), ("mine", 3, out / "base")):
        settings = {
            "model": {"path": str(task / "init"), "random_init": True},
            "out": str(out / name),
            "reward": "tests.tiny:digit_reward",
            "seed": seed,
            "tasks": tasks,
        }
        run_suite(load(EvalConfig, settings), against)
    return out


def test_a_page_of_evaluations(task, results, tmp_path, capsys):
    assert cli.main(["report", str(results), "--out", str(tmp_path)]) == cli.OK
    text = capsys.readouterr().out
    assert text.count("95% interval") == 2
    assert "8 shared" in text
    page = (tmp_path / "report.html").read_text()
    assert "&lt;often&gt;" in page
    assert "<often>" not in page
    assert page.count("<thead>") == page.count("8 shared") == 2  # of one model
    assert f"<title>Evaluation: {task / 'init'}</title>" in page
    assert f"compared with {results / 'base'}." in page
    assert page.count('<tr class=split><th scope="row">+</th>') == 2
    assert page.count("data:image/svg+xml;base64,") == 1
    assert not list(tmp_path.glob("plots"))


def test_evaluations_and_runs_share_a_page(results, tmp_path, no_images):
    run = write_run(tmp_path / "gac", ROWS, ["logic"])
    page = write_report([run, results / "mine"], tmp_path).read_text()
    assert "<h2>Evaluations</h2>" in page
    assert "Held-out accuracy: logic" in page


def test_foreign_results_json_is_ignored_or_rejected(results, tmp_path, no_images):
    run = write_run(tmp_path / "gac", ROWS, ["logic"])
    (run / "results.json").write_text("[]")
    assert "Evaluations" not in write_report([run], tmp_path).read_text()
    (run / "samples.jsonl.gz").write_bytes(b"")
    for text in ("[]", "{", "{}", '{"tasks": {"a": {}}}', '{"tasks": 1}'):
        (run / "results.json").write_text(text)
        message = r"results.json is not a valid `gac eval` result .*: move it away"
        with pytest.raises(ConfigError, match=message):
            write_report([run], tmp_path)


def test_the_loss_of_held_out_demonstrations_is_a_figure(tmp_path):
    """Of the first task and of each further one that has demonstrations."""
    rows = [row | {"demo_nll": 2.0 - row["step"] / 100, "demo_nll/logic": None} for row in ROWS]
    groups = group_runs([read_run(write_run(tmp_path / "gac", rows, ["logic"]))])
    titles = {panel.title: panel for panel in evaluation_panels(groups)}
    panel = titles["Held-out demonstration loss"]
    assert "Held-out demonstration loss: logic" not in titles
    ((steps, values),) = plots._curves(groups[0], panel)
    assert values.tolist() == [2.0 - step / 100 for step in steps]
