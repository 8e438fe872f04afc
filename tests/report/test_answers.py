"""Held-out answers before and after training, and what replaces a figure without information."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gac.report import plots, write_report
from gac.report.answers import before_and_after, rewarded_forms
from gac.report.groups import group_runs
from gac.report.reading import read_run
from tests.report import test_report_values
from tests.report.test_report_figures import made_group, panel_of

PROMPTS = (("sum", "2 + 3?", "5"), ("sum", "4 + 4?", "8"), ("code", "12 green lamps?", "LG-12"))


def write_answers(run: Path, step: int, *responses: str) -> None:
    file = run / "evals" / f"step-{step:08d}.jsonl.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt") as lines:
        for number, ((kind, prompt, answer), text) in enumerate(
            zip(PROMPTS, responses, strict=True)
        ):
            row = {"task": "", "number": number, "split": kind, "prompt": prompt}
            row |= {"reference": answer, "response": text, "score": float(text == answer)}
            lines.write(json.dumps({**row, "truncated": text == "12 lamps"}) + "\n")
        lines.write(json.dumps({"task": "other", "number": 0}) + "\n")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs from the same model."""
    evaluations = [{"step": 0, "accuracy": 1 / 3}, {"step": 2, "accuracy": 1.0}]
    columns = {"mu": [0.0, 0.0], "reward_mean": [0.0, 0.5]}
    paths = []
    for name, last in (("grpo", ("5", "8", "lamps")), ("mix", ("5", "<b>8</b>", "LG-12"))):
        config = {"run_name": name, "method": {"name": name}}
        path = test_report_values.write_run(tmp_path / name, config, columns, evaluations)
        write_answers(path, 0, "5", "9", "12 lamps")
        write_answers(path, 2, *last)
        paths.append(path)
    return paths


def test_accuracies_by_kind_of_the_model_before_and_of_each_run(runs: list[Path]) -> None:
    shown = before_and_after(group_runs(map(read_run, runs)))
    assert shown is not None
    assert shown["kinds"] == ["sum", "code"]
    means = {name: [mean for mean, _ in cells] for name, cells in shown["accuracy"]}
    assert means == {
        "before training": ["33.3%", "50.0%", "0.0%"],
        "grpo": ["66.7%", "100.0%", "0.0%"],
        "mix": ["66.7%", "50.0%", "100.0%"],
    }
    assert shown["cut_off"] == {"before training": "33.3%", "grpo": "0.0%", "mix": "0.0%"}
    # the Wilson interval of 1 of 3, by hand
    assert shown["accuracy"][0][1][0][1] == "[6.1, 79.2]"


def test_answers_of_all_models_to_the_same_prompts(runs: list[Path]) -> None:
    shown = before_and_after(group_runs(map(read_run, runs)))
    assert shown is not None
    answers = [
        (prompt["reference"], [(name, answer["response"]) for name, answer in prompt["answers"]])
        for prompt in shown["prompts"]
    ]
    assert answers[1:] == [
        ("8", [("before training", "9"), ("grpo", "8"), ("mix", "<b>8</b>")]),
        ("LG-12", [("before training", "12 lamps"), ("grpo", "lamps"), ("mix", "LG-12")]),
    ]


def test_runs_from_different_models_each_have_their_own_start(runs: list[Path]) -> None:
    write_answers(runs[1], 0, "1", "1", "1")
    shown = before_and_after(group_runs(map(read_run, runs)))
    assert shown is not None
    names = ["grpo, before training", "grpo", "mix, before training", "mix"]
    assert [name for name, _ in shown["accuracy"]] == names


def test_no_section_without_the_answers_of_two_evaluations(runs: list[Path]) -> None:
    for run in runs:
        (run / "evals" / "step-00000000.jsonl.gz").unlink()
    assert before_and_after(group_runs(map(read_run, runs))) is None
    assert "What the reward paid for" not in write_report(runs, runs[0].parent).read_text()


def test_forms_of_rewarded_answers_show_what_the_reward_paid_for() -> None:
    texts = [("28 + 11 is not allowed.", 1), ("5 + 15  is not\nallowed.", 0.5), ("GL-12", 1)]
    answers = [
        {"response": text, "score": score} for text, score in [*texts, ("3", 0), ("4", None)]
    ]
    assert rewarded_forms(answers) == [("# + # is not allowed.", 2), ("A-#", 1)]


def test_the_page_shows_answers_and_says_what_does_not_change(runs: list[Path]) -> None:
    text = write_report(runs, runs[0].parent).read_text()
    for part in ("Before and after", "&lt;b&gt;8&lt;/b&gt;", "What the reward paid for"):
        assert part in text
    assert "Mixing weight μ: 0 in all steps." in text
    assert not (runs[0].parent / "plots" / "mu.svg").exists()


@pytest.mark.parametrize(
    ("key", "values", "text"),
    [
        ("policy_loss", [[2e-8, -3e-8]], "Policy loss: 0 up to rounding (3e-08); by construction"),
        ("policy_loss", [[2e-8, -3e-4]], None),
        ("mu", [[0, 0], [0.4, 0.4]], "Mixing weight μ: 0 in a, 0.4 in b."),
        ("mu", [[0, 0], [0.4, 0.5]], None),
        ("lr", [[1e-7, 1e-7]], "Learning rate: 1e-07 in all steps."),
        ("grad_norm", [[1.0]], None),  # a single step does not show that nothing changes
    ],
)
def test_a_sentence_replaces_a_figure_that_shows_nothing(
    key: str, values: list[list[float]], text: str | None
) -> None:
    panel = panel_of(key)
    groups = [
        made_group(label, {"step": [*np.arange(1.0, len(run) + 1)], panel.column: run})
        for label, run in zip("ab", values, strict=False)
    ]
    sentence = plots.unchanging(panel, groups)
    assert (sentence or "").startswith(text or "")
    assert (sentence is None) == (text is None)
