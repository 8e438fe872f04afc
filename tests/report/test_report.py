"""The report: statistics with hand-computed values, files of killed runs, and the full page."""

import json
import math
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from gac.report import find_runs, plots, results_table, write_report
from gac.report.groups import caution, differences, group_runs
from gac.report.page import headline
from gac.report.plots import evaluation_panels, smoothing_span
from gac.report.reading import read_columns, read_run
from gac.report.statistics import (
    band,
    final_and_best,
    kl_area,
    large_mu_events,
    mean_sd,
    smooth,
    total,
    variance,
)
from gac.report.table import Column, runs_table, summarize, window_of, write_cell
from tests.report import test_report_values

STEPS = 40


def write_run(path: Path, method="gac", seed=0, steps=STEPS, planned=STEPS, **settings) -> Path:
    """A run whose numbers are simple functions of the step."""
    config = {"out": str(path), "seed": seed, "steps": planned, "method": {"name": method}}
    numbers = range(1, steps + 1)
    values = {
        "mu_star": None,
        "prior": 0.5,
        "alpha": None,
        "sft_variance": math.nan,
        "rl_variance": 0.5,
        "grad_norm": 1.0,
        "tokens": 1000,
        "seconds": 0.6,
    }
    columns = {name: [value] * steps for name, value in values.items()} | {
        "mu": [0.01 * step for step in numbers],
        "kl": [0.1 * step for step in numbers],
        "rollout_loss": [0.1 * (-1) ** step for step in numbers],
        "reward_mean": [step / 100 for step in numbers],
        "completions/mean_length": [9 + step % 2 for step in numbers],
    }
    columns |= {
        name: [1 + step % 2 for step in numbers]
        for name in ("demo_loss", "entropy", "frac_reward_zero_std", "disagreement")
    }
    return test_report_values.write_run(
        path,
        config | settings,
        columns,
        [
            {"step": step, "accuracy": accuracy, "accuracy/+": 1.0, "accuracy/-": 0.0}
            for step, accuracy in ((10, 0.2), (20, 0.6 + seed / 10), (40, 0.5 + seed / 10))
        ],
    )


# --- statistics


def arrays(*rows):
    return [np.array(row, dtype=float) for row in rows]


def test_kl_area_is_the_trapezoid_over_steps_with_a_kl():
    # 10 (0 + 2) / 2 + 20 (2 + 1) / 2
    assert kl_area(*arrays([0, 10, 30], [0, 2, 1])) == pytest.approx(40)
    assert kl_area(*arrays([0, 5, 10], [0, math.nan, 2])) == pytest.approx(10)
    assert math.isnan(kl_area(*arrays([0, 1], [math.nan, math.nan])))


def test_large_mu_events_counts_windows_not_steps():
    steps = np.arange(1, 32)
    mu = np.where(steps <= 11, 0.5, 0.5 + 0.01 * (steps - 11))  # flat, then +0.1 per window
    assert large_mu_events(steps, mu, window=10) == (2, 3)
    assert large_mu_events(steps, mu, window=10, threshold=0.2) == (0, 3)
    steps = np.arange(21)  # exactly the threshold is not large
    assert large_mu_events(steps, 0.3 + 0.002 * steps, window=10) == (0, 2)
    assert large_mu_events(steps, 0.3 - 0.0021 * steps, window=10) == (2, 2)
    # windows with a missing end are skipped
    steps, mu = arrays([0, 5, 10, 20], [0.1, 0.9, math.nan, 0.5])
    assert large_mu_events(steps, mu, window=10) == (0, 0)
    assert large_mu_events(steps, mu, window=5) == (1, 1)
    assert large_mu_events(*arrays([], []), window=5) == (0, 0)


def test_smooth_is_a_bias_corrected_ema():
    # span 3 -> decay 1/2: 1, (0.5 + 2) / 1.5, (0.25 + 1 + 3) / 1.75
    assert smooth(np.array([1.0, 2.0, 3.0]), 3) == pytest.approx([1, 2.5 / 1.5, 4.25 / 1.75])
    assert smooth(np.full(5, 7.0), 4) == pytest.approx(np.full(5, 7.0))


def test_all_runs_of_a_page_share_the_smoothing_span(tmp_path):
    assert smoothing_span(grouped(*(write_run(tmp_path / str(n), steps=n) for n in (24, 36)))) == 3


def test_band_covers_the_steps_common_to_all_seeds():
    full, unfinished = arrays([0, 10, 20, 30], [0, 1, 2, 3]), arrays([0, 20], [2, 6])
    steps, mean, low, high = band([tuple(full), tuple(unfinished)])
    assert steps.tolist() == [0, 10, 20]
    assert mean.tolist() == [1, 2.5, 4]
    assert low.tolist() == [0, 1, 2]
    assert high.tolist() == [2, 4, 6]
    assert len(band([])[0]) == 0


def test_summary_statistics_ignore_nan():
    nan = math.nan
    assert final_and_best(*arrays([1, 2, 3, 4], [0.1, 0.9, 0.9, nan])) == (0.9, 0.9, 2)
    assert np.isnan(final_and_best(*arrays([1], [nan]))).all()
    assert mean_sd([1, 3, nan]) == (2, pytest.approx(math.sqrt(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns about a variance of one value
        assert np.isnan(mean_sd([5.0])[1])
        assert mean_sd([5.0])[0] == 5
    assert variance(np.array([1, 3, nan])) == 1
    assert total(np.array([1, 3, nan])) == 4
    assert math.isnan(total(np.array([nan])))


def test_a_cell_shows_mean_and_sd_to_the_same_digit():
    assert write_cell((0.8333, 0.0211), Column("x", "x", 100, 1)) == "83.3 ± 2.1"
    assert write_cell((0.8333, math.nan), Column("x", "x", 100, 1)) == "83.3"
    assert write_cell((57.62, 0.749), Column("x", "x")) == "57.6 ± 0.7"
    assert write_cell((0.01234, 0.001), Column("x", "x")) == "0.0123 ± 0.0010"
    assert write_cell((1234567.0, math.nan), Column("x", "x")) == "1,234,567"
    assert write_cell((0.0, 0.0), Column("x", "x")) == "0 ± 0"
    assert write_cell((math.nan, math.nan), Column("x", "x")) == "–"


# --- reading


def test_reading_survives_a_torn_line_nan_null_and_absent_fields(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "mu": 0.5, "kl": NaN, "name": "x"}\n'
        "\n"
        '{"step": 2, "mu": null, "entropy": 1}\n'
        '{"no step": 3}\n'
        '{"step": 3, "mu": 0.'
    )
    columns, unreadable = read_columns(path)
    # fields without any number are left out
    assert unreadable == 2
    assert set(columns) == {"step", "mu", "entropy"}
    np.testing.assert_array_equal(columns["mu"], [0.5, math.nan])
    np.testing.assert_array_equal(columns["entropy"], [math.nan, 1])


def test_resumed_rows_replace_earlier_rows_of_the_same_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps({"step": s, "mu": m}) + "\n"
            for s, m in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35))
        )
    )
    columns, _ = read_columns(path)
    assert columns["step"].tolist() == [1, 2, 3]
    assert columns["mu"].tolist() == [0.1, 0.25, 0.35]


def test_run_without_metrics_can_be_read(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    run = read_run(tmp_path)
    assert (run.steps_done, run.steps_planned, run.seed, run.splits) == (0, None, None, [])
    page = write_report([tmp_path], tmp_path / "out").read_text()
    assert "no config.yaml" in page
    assert "Not recorded: Held-out accuracy." in page


def test_find_runs_takes_runs_and_folders_of_runs_once(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "a" / "deep" / "b")
    assert find_runs([a, tmp_path]) == [a, b]
    assert find_runs([a]) == [a]
    with pytest.raises(FileNotFoundError, match=r"nothing: no runs found \(no metrics\.jsonl"):
        find_runs([tmp_path / "nothing"])


# --- grouping


def grouped(*paths):
    return group_runs([read_run(path) for path in paths])


def test_runs_that_differ_only_by_seed_and_folder_are_one_group(tmp_path):
    data = "task/seed{}/demos.jsonl"
    paths = [write_run(tmp_path / ("gac" + s * "-1"), seed=s, data=data.format(s)) for s in (0, 1)]
    other = write_run(tmp_path / "grpo", method="grpo", data="task/seed0/demos.jsonl")
    assert [(group.label, group.seeds) for group in grouped(paths[0], other, paths[1])] == [
        ("gac", [0, 1]),
        ("grpo", [0]),
    ]


def test_different_settings_make_separate_labelled_groups(tmp_path):
    groups = grouped(
        write_run(tmp_path / "a", seed=0, optim={"lr": 1e-3}),
        write_run(tmp_path / "b", seed=1, optim={"lr": 1e-4}),
    )
    assert [group.label for group in groups] == ["a", "b"]
    assert differences(groups) == {"optim.lr": [1e-3, 1e-4]}
    groups = grouped(
        *(
            write_run(
                tmp_path / name,
                model={"path": 9 * name},
                data=dict.fromkeys(("prompts", "demos", "sources", "order"), 9 * name),
                eval={
                    "data": {"limit": 9 * name},
                    "tasks": {"x": {"stop": 9 * name}},
                    "stop": 9 * name,
                    "reward": 9 * name if name == "first" else None,
                },
                reward=9 * name,
            )
            for name in ("first", "second")
        )
    )
    assert [group.label for group in groups] == ["first", "second"]
    assert caution(groups) == (
        "These runs differ in model.path, data.prompts, data.demos, data.sources, eval.data.limit, "
        "eval.tasks.x.stop, eval.stop, eval.reward, reward: their accuracies do not rank their "
        "methods. "
    )
    evals = {x: {"reward": {"name": "math"}, "every": len(x)} for x in ("code", "math2")}
    assert not caution(
        grouped(*(write_run(tmp_path / x, reward=x, eval=own) for x, own in evals.items()))
    )


def test_label_is_the_run_name_without_its_seed_and_needs_a_configuration(tmp_path):
    paths = [write_run(tmp_path / str(s), seed=s, run_name=f"mine seed{s}") for s in (1, 2)]
    assert [group.label for group in grouped(*paths)] == ["mine"]
    (group,) = grouped(*(write_run(tmp_path / f"gac-{s}", seed=s) for s in (10, 11, 12)))
    assert group.label == "gac"
    (group,) = grouped(write_run(tmp_path / "mu-0.1", seed=1))
    assert group.label == "mu-0.1"
    paths = [write_run(tmp_path / name) for name in ("a", "b")]
    for path in paths:
        (path / "config.yaml").unlink()
    assert [group.label for group in grouped(*paths)] == ["a", "b"]


def test_a_folder_follows_a_name_that_groups_share(tmp_path):
    low, high = ({"optim": {"lr": lr}, "run_name": "mine"} for lr in (1e-4, 1e-3))
    groups = grouped(write_run(tmp_path / "low", **low), write_run(tmp_path / "high", **high))
    assert [group.label for group in groups] == ["mine (low)", "mine (high)"]
    groups = grouped(*(write_run(tmp_path / x / "a", optim={"lr": n}) for n, x in enumerate("xy")))
    assert [group.label for group in groups] == ["a (x)", "a (y)"]


# --- summary


def test_the_controller_interval_requires_agreement_between_runs(tmp_path):
    same = [read_run(write_run(tmp_path / "a", method="sft"))]
    same.append(read_run(write_run(tmp_path / "b", controller={"update_every": 20})))
    assert window_of(same) == 20  # the run without the setting is measured in the same way
    same.append(read_run(write_run(tmp_path / "c", controller={"update_every": 5})))
    assert window_of(same) == 10


def test_headline_names_the_leader_and_the_seed_spread(tmp_path):
    ahead = [write_run(tmp_path / f"a-{s}", seed=s) for s in (0, 1, 2)]
    behind = [write_run(tmp_path / f"b-{s}", method="sft", seed=s) for s in (0, 1)]
    for path, accuracy in zip((*ahead, *behind), (0.5, 0.75, 1, 0.5, 0.5), strict=True):
        (path / "eval.jsonl").write_text(f'{{"step": 40, "accuracy": {accuracy}}}\n')
    groups = grouped(*behind, *ahead)
    text = headline(groups, window_of([run for group in groups for run in group.runs]))
    assert "a with 75.0 ± 25.0%, 25.0 points above b (50.0%)" in text
    assert "within the spread over seeds" in text
    assert "Without several seeds" in headline(grouped(behind[0], ahead[0]), window_of([]))


def test_a_single_run_has_an_interval_and_a_number_of_prompts(tmp_path):
    path = test_report_values.write_run(
        tmp_path / "a",
        {},
        {"mu": [0.5] * STEPS},
        [
            {"step": step, "accuracy": mean, "ci95": [mean - 0.1, mean + 0.2], "prompts": 50}
            for step, mean in ((0, 0.0), (STEPS, 0.5))
        ],
    )
    assert headline(grouped(path), 10) == (
        "Final accuracy: 50.0% [40.0, 70.0]. The initial model has 0.0% [-10.0, 20.0]."
    )
    text = runs_table([read_run(path)])
    assert text.startswith("Accuracy (50 prompts)")
    assert "50.0 [40.0, 70.0]" in text
    bars = write_report([path], tmp_path / "report").parent / "plots" / "accuracy.svg"
    assert "LineCollection" in bars.read_text()
    page = (tmp_path / "report" / "report.html").read_text()
    assert '50.0 <span class="sd">[40.0, 70.0]</span>' in page
    assert "legend" not in bars.read_text()


def with_start(path, accuracy):
    """Prepend an evaluation of the initial model to the run's evaluations."""
    (path / "eval.jsonl").write_text(
        f'{{"step": 0, "accuracy": {accuracy}, "accuracy/+": 0.3}}\n'
        + (path / "eval.jsonl").read_text()
    )
    return path


def test_start_model_is_a_baseline_not_a_result(tmp_path):
    better_start = with_start(write_run(tmp_path / "a"), 0.9)  # training made it worse
    run = read_run(better_start)
    row = summarize(run, window_of([run]))
    assert (row["start"], row["final"], row["best"]) == (0.9, 0.5, 0.6)
    (group,) = grouped(better_start)
    assert re.search(r"50\.0%\. The initial model .*90\.0%", headline([group], window_of([run])))
    (steps, values), *_ = plots._curves(group, evaluation_panels([group])[0])
    assert (steps[0], values[0]) == (0, 0.9)  # the curve begins at the initial model


def test_headline_omits_differing_or_lone_start_evaluations(tmp_path):
    paths = [with_start(write_run(tmp_path / f"{x}", seed=i), x) for i, x in enumerate((0.2, 0.3))]
    paths.append(write_run(tmp_path / "without", method="sft"))
    for subset in (paths, paths[1:]):
        groups = grouped(*subset)
        text = headline(groups, window_of([run for group in groups for run in group.runs]))
        assert "Highest final accuracy" in text
        assert "initial model" not in text
    (paths[0] / "eval.jsonl").write_text('{"step": 0, "accuracy": 0.2}\n')
    text = headline(grouped(paths[0]), window_of([]))
    assert text == "None of these runs has been evaluated yet."


def test_unmeasured_terms_are_listed_not_plotted_as_zero(tmp_path, no_images):
    columns = {"mu": [0.5], "rollout_loss": [None], "reward_mean": [None]}
    page = write_report([test_report_values.write_run(tmp_path / "a", {}, columns, [])], tmp_path)
    assert "Not recorded: Reward, Response length, Entropy, Policy loss." in page.read_text()
    assert not (tmp_path / "plots" / "policy_loss.svg").exists()


# --- the page


class Page(HTMLParser):
    """Collects a page's images, links and unclosed tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.links += [attributes[key] for key in ("src", "href") if key in attributes]
        if tag == "img":
            self.images.append(attributes)
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(root / f"gac-{seed}", seed=seed, controller={"kl_target": 0.5})
    sft = write_run(root / "sft", method="sft", steps=25, note="<script>alert(1)</script>")
    with (sft / "metrics.jsonl").open("a") as file:
        file.write('{"step": 26, "mu"')  # a line torn by a kill
    return write_report([root], root / "out")


def test_page_is_self_contained(report):
    page = Page(report.read_text())
    rows = re.findall(r'class="panels( three)?"', report.read_text())
    assert page.open == []
    assert rows == [" three", "", "", ""]
    assert [image["alt"].partition(" over")[0] for image in page.images] == [
        "Held-out accuracy",
        "Held-out accuracy: +",
        "Held-out accuracy: -",
        "Reward",
        "Response length",
        "Entropy",
        "Policy loss",
        "Demonstration loss",
        "Groups without signal",
        "Mixing weight μ",
        "Disagreement Δg̃²",
    ]
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not re.search(r"https?://|@import|url\(", report.read_text())


def test_the_page_says_what_is_missing_unfinished_or_skipped(report):
    text = report.read_text()
    assert re.search(r"25 steps of 40 .*unfinished.*; 1 unreadable line", text)
    for part in (
        "Not recorded: SFT variance σₛ².",
        "Gradient norm: 1 in all steps.",
        "RL variance σᵣ²: 0.5 in all steps.",
        "areas and sums of shorter runs cover fewer steps",
        "μ changed by more than 0.02",
        "Settings that differ",
        "<code>method.name</code>",
    ):
        assert part in text
    assert "&lt;script&gt;" in text
    assert "<script" not in text


def test_plots_are_files_next_to_the_page(report):
    plots = report.parent / "plots"
    names = {path.name for path in plots.iterdir()}
    assert names >= {
        *("overview.png", "mu.svg", "accuracy.svg", "accuracy_1_+.svg", "accuracy_2_-.svg")
    }
    mu = (plots / "mu.svg").read_text()
    assert "stroke: #0072b2" in mu
    assert "dc:date" not in mu


def test_terminal_table_is_aligned_and_complete(report):
    accuracy, stability = results_table([report.parent.parent]).split("\n\n")
    lines = accuracy.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert re.search(r"gac .* 55\.0 ± 7\.1 .* 65\.0 ± 7\.1 ", lines[2])
    assert "25 of 40" in lines[3]
    # mu rises by 0.1 in every window of 10
    assert "large μ changes %" in stability
    assert "100.0 ± 0.0" in stability
