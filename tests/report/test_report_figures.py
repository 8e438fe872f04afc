"""The figures of a report: their curves, bands, limits and legends, by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from gac.report import evaluations, find_folders, plots, results_table
from gac.report.evaluations import Evaluation
from gac.report.groups import Group


def draw(draw_axes: Any, *arguments: Any) -> Any:
    axes = Figure(figsize=(5.6, 3.7)).subplots()
    draw_axes(axes, *arguments)
    return axes


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))


def made_group(label: str, *columns: dict[str, list[float]]) -> Group:
    made = [{name: np.array(values, float) for name, values in run.items()} for run in columns]
    runs: Any = [
        SimpleNamespace(
            metrics={name: values for name, values in run.items() if "accuracy" not in name},
            evals={
                name: run[name]
                for name in run
                if name in ("step", "low", "high") or "accuracy" in name
            },
            steps_done=len(run["step"]),
        )
        for run in made
    ]
    return Group(label, tuple(runs))


def panel_of(key: str) -> plots.Panel:
    return next(
        panel for panel in (*plots.TRAINING, *plots.OPTIMIZATION, *plots.MIXING) if panel.key == key
    )


@pytest.fixture
def lengths() -> list[Group]:
    """Two seeds of the first group; one run each of the others, of which one lacks the column."""
    name, nan = "completions/mean_length", math.nan
    seeds = {"step": [1, 2, 3], name: [4, 6, 8]}, {"step": [1, 2], name: [8, 4]}
    single = {"step": [1, 2, 3, 4], name: [1, nan, 2, 3]}
    return [
        made_group("seeds", *seeds),
        made_group("without", {"step": [1, 2]}),
        made_group("single", single),
    ]


def test_seeds_are_drawn_as_their_mean_and_a_band(lengths: list[Group]) -> None:
    axes = draw(plots._draw_panel, panel_of("response_length"), lengths)
    mean, *_ = axes.lines
    assert points(mean) == [(1, 6), (2, 5)]
    assert mean.get_label() == "seeds"
    assert mean.get_marker() == plots.MARKERS[0]
    (band,) = axes.collections
    extent = band.get_paths()[0].get_extents()
    assert (extent.x0, extent.x1, extent.y0, extent.y1) == (1, 2, 4, 8)
    assert to_hex(band.get_facecolor()[0]) == plots.COLORS[0].lower()
    assert band.get_alpha() < 0.5


def test_a_single_run_is_drawn_as_a_line_and_a_pale_trace(lengths: list[Group]) -> None:
    axes = draw(plots._draw_panel, panel_of("response_length"), lengths)
    _, trace, line = axes.lines
    assert points(trace) == points(line) == [(1, 1), (3, 2), (4, 3)]
    assert trace.get_alpha() < 0.5
    assert line.get_alpha() is None
    assert line.get_label() == "single"
    assert line.get_marker() == plots.MARKERS[2]
    assert [x.get_color() for x in axes.lines] == [plots.COLORS[i] for i in (0, 2, 2)]


def test_the_axes_of_a_panel(lengths: list[Group]) -> None:
    panel = panel_of("response_length")
    axes = draw(plots._draw_panel, panel, lengths)
    assert (axes.get_title(loc="left") or axes.get_title()) == panel.title
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("tokens", "optimizer step")
    assert all(tick == int(tick) for tick in axes.get_xticks())
    # all smoothed lines and the middle 98% of the trace, 1.02 to 2.98, and 6% of the height
    assert axes.get_ylim() == pytest.approx((1 - 0.06 * 7, 8 + 0.06 * 7))
    assert axes.get_xlim() == pytest.approx((0.97, 4.03))


def test_a_smoothed_line_is_dashed_beside_its_values(lengths: list[Group]) -> None:
    axes = draw(plots._metric, panel_of("response_length"), lengths[2], 1, 3.0)
    values, smoothed = axes.lines
    assert points(values) == [(1, 1), (3, 2), (4, 3)]
    assert [y for _, y in points(smoothed)] == pytest.approx([1, 2.5 / 1.5, 4.25 / 1.75])
    assert smoothed.is_dashed()
    assert not values.is_dashed()


@pytest.mark.parametrize(
    ("values", "runs", "limits"),
    [
        ([0.0] * 100 + [1000.0] + [0.0] * 100, 1, (-12, 212)),  # a spike, smoothed to 200
        # traces are drawn for single runs only; six spikes are smoothed to (1 - 0.8**6) * 1000
        ([0.0] * 200 + [1000.0] * 6 + [0.0] * 100, 1, (-60, 1060)),
        ([0.0] * 200 + [1000.0] * 6 + [0.0] * 100, 2, (-44.27136, 782.12736)),
        ([4.0] * 5, 1, (3.8, 4.2)),
        ([0.0] * 5, 1, (-0.05, 0.05)),
    ],
)
def test_the_height_of_a_panel(values: list[float], runs: int, limits: tuple[float, float]) -> None:
    group = made_group("x", *[{"step": [*range(len(values))], "grad_norm": values}] * runs)
    assert draw(plots._fit_height, panel_of("grad_norm"), [group], 9.0).get_ylim() == pytest.approx(
        limits, rel=1e-6
    )


def test_mu_is_drawn_with_its_prior_and_its_target() -> None:
    nan = math.nan
    columns = {"step": [1, 2, 3], "mu": [0.1, 0.2, 0.3], "prior": [0.9, 0.8, 0.7]}
    others = [made_group(name, {"step": [1], "mu": [0.5]}) for name in "ab"]
    group = made_group("gac", columns | {"mu_star": [nan, 0.4, nan]})
    axes = draw(plots._draw_panel, panel_of("mu"), [*others, group])
    prior, target, mu = axes.lines[-3:]
    assert {line.get_color() for line in (prior, target, mu)} == {plots.COLORS[2]}
    assert points(prior) == [(1, 0.9), (2, 0.8), (3, 0.7)]
    assert prior.get_linestyle() == ":"
    assert points(target) == [(2, 0.4)]
    assert target.get_marker() == "."
    assert points(mu) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert mu.get_label() == "gac"
    assert axes.get_ylim() == (-0.03, 1.03)
    assert mu.get_markevery() == (0, 1)


FLIPS = [step % 2 for step in range(299)]  # 0, 1, 0, 1 and so on
FLIPPING: dict[str, list[float]] = {
    "step": [*range(299)],
    **dict.fromkeys(("accuracy", "accuracy/+", "lr", "grad_norm"), FLIPS),
    "low": [x - 0.25 for x in FLIPS],
    "high": [x + 0.5 for x in FLIPS],
}
ACCURACY = plots.Panel("k", "title", "accuracy", "accuracy", "", "accuracy")


def test_accuracies_are_drawn_with_their_intervals_and_not_smoothed() -> None:
    axes = draw(plots._draw_panel, ACCURACY, [made_group("x", FLIPPING)])
    (line,) = axes.lines
    assert line.get_ydata().tolist() == FLIPS
    assert line.get_markevery() == (0, 12)
    (bars,) = axes.collections
    first, second = (x.tolist() for x in bars.get_segments()[:2])
    assert first == [[0, -0.25], [0, 0.5]]
    assert second == [[1, 0.75], [1, 1.5]]
    assert to_hex(bars.get_color()[0]) == plots.COLORS[0].lower()
    assert bars.get_alpha() < 1
    assert axes.get_ylim() == (-0.28, 1.53)
    assert axes.yaxis.get_major_formatter()(0.25, 0) == "25%"


def test_splits_and_several_seeds_have_no_interval_bars() -> None:
    split = replace(ACCURACY, column="accuracy/+")
    assert not draw(plots._accuracy, split, made_group("x", FLIPPING), 0, 1).collections
    (band,) = draw(plots._accuracy, ACCURACY, made_group("x", *[FLIPPING] * 2), 0, 1).collections
    assert isinstance(band, PolyCollection)


def test_long_titles_are_wrapped_at_42_characters() -> None:
    title = " ".join("x" * length for length in (20, 21, 20, 22))
    axes = draw(plots._draw_panel, replace(ACCURACY, title=title), [made_group("x", FLIPPING)])
    assert [len(text) for text in axes.title.get_text().split("\n")] == [42, 20, 22]


def test_exact_values_are_not_smoothed() -> None:
    exact, smoothed = (
        draw(plots._draw_panel, panel_of(key), [made_group("x", FLIPPING)]).lines[-1]
        for key in ("lr", "grad_norm")
    )
    assert exact.get_ydata().tolist() == FLIPS
    assert smoothed.get_ydata()[1] == pytest.approx(1 / (2 - 2 / (299 / 12 + 1)))


def test_markers_of_different_groups_are_offset() -> None:
    axes = draw(plots._line, "x", [(np.arange(70.0), np.arange(70.0))], 3)
    assert axes.lines[0].get_markevery() == (6, 10)


def test_legends_name_every_group_in_as_many_columns_as_fit() -> None:
    figure = Figure(figsize=(11, 4))  # 132 characters: twelve labels of 2, each with 9 more
    names = ["g", "gg", *"abcdefghijkl"]
    groups = [Group(name, ()) for name in names]
    plots._legend(figure, groups[:1])  # one run needs no legend
    plots._legend(figure, groups)
    plots._legend(figure, [Group("g" * 200, ())] * 2)
    legend, narrow = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert (legend._ncols, narrow._ncols, legend._outside_loc) == (12, 1, "lower")
    assert (legend.handlelength, legend.columnspacing) == (3.4, 1.6)
    assert [x.get_color() for x in legend.get_lines()[7:9]] == [plots.COLORS[7], plots.COLORS[0]]
    assert plots.group_style(7)["linestyle"] == (0, (6, 2))


@pytest.fixture
def drawn(monkeypatch: Any) -> dict[str, Any]:
    """The figures that are written, by the name of their file."""
    figures: dict[str, Any] = {}

    def write(figure: Any, path: Path) -> Path:
        figures[path.name] = figure
        return path

    monkeypatch.setattr(plots, "_write", write)
    return figures


def recorded(label: str, **columns: list[float]) -> Group:
    """A run of two steps."""
    group = made_group(label, {"step": [1, 2], "mu": [0.1, 0.2], **columns})
    for run in group.runs:
        vars(run).update(splits=["a+/1"], tasks=[])
    return group


MEASURED = {"lr": [1, 2], "entropy": [3, 4], "accuracy": [0, 1], "accuracy/a+/1": [0, 1]}
PLOTS = ["accuracy", "accuracy_1_a+_1", "entropy", "lr", "mu"]


def test_a_report_has_a_figure_for_each_measured_column(tmp_path: Path, drawn: Any) -> None:
    files = plots.draw_plots([recorded("x", **MEASURED)], tmp_path)
    expected = {name: tmp_path / f"{name}.svg" for name in PLOTS}
    assert files == expected | {"overview": tmp_path / "overview.png"}
    sizes = [drawn[f"{name}.svg"].get_size_inches().tolist() for name in PLOTS]
    assert sizes == [[4.6, 3.5]] * 2 + [[5.6, 3.7]] * 3


def test_the_overview_of_a_report(tmp_path: Path, drawn: Any) -> None:
    plots.draw_plots([recorded("x", **MEASURED)], tmp_path)
    overview = drawn["overview.png"]
    titles = [axes.get_title("left") for axes in overview.axes]
    assert titles == ["Held-out accuracy", "Entropy", "Mixing weight μ"]
    assert overview.get_layout_engine()
    assert overview.dpi == 160
    first, *_ = overview.axes
    assert first.get_axisbelow()
    assert first.yaxis.get_tick_params()["gridOn"] > first.xaxis.get_tick_params()["gridOn"]


@pytest.mark.parametrize(
    ("number", "shown", "size"),
    [(2, [True] * 2, (8.8, 3.2)), (4, [True] * 4 + [False] * 2, (13.2, 6.1))],
)
def test_the_grid_of_an_overview(
    tmp_path: Path, drawn: Any, number: int, shown: list[bool], size: tuple[float, float]
) -> None:
    panels = 2 * [panel_of("entropy"), panel_of("mu")]
    plots._draw_overview(panels[:number], [recorded("x", **MEASURED)], tmp_path / "grid.png")
    assert [axes.axison for axes in drawn["grid.png"].axes] == shown
    assert drawn["grid.png"].get_size_inches() == pytest.approx(size)


def test_only_figures_of_several_groups_have_a_legend(tmp_path: Path, drawn: Any) -> None:
    one = recorded("x", **MEASURED)
    files = plots.draw_plots([one], tmp_path)
    assert not drawn["mu.svg"].legends
    assert not drawn["overview.png"].legends
    assert plots.draw_plots([one, recorded("y")], tmp_path) == files
    for name in ("mu.svg", "overview.png"):
        assert [legend.get_frame_on() for legend in drawn[name].legends] == [False]


# --- results of gac eval


def evaluation(path: str, *models: str, **accuracies: float) -> Evaluation:
    return Evaluation(
        Path(path),
        {
            "tasks": {
                name: {
                    "accuracy": value,
                    "ci95": [value - 0.125, value + 0.25],
                    "setting": {"model": {"path": model}},
                    "splits": {"hard": {"accuracy": 0.25, "ci95": [0.0, 0.5], "prompts": 3}},
                    "pass_at": {"2": 0.75},
                    "prompts": 8,
                    "samples": 2,
                    "truncated": 0.5,
                    "dropped": 1,
                    "against": {"results": f"old/{model}", "difference": None},
                }
                for (name, value), model in zip(accuracies.items(), models, strict=True)
            }
        },
    )


def test_each_folder_is_found_once(tmp_path: Path, monkeypatch: Any) -> None:
    """The first folder holds a run and an evaluation."""
    run, other = tmp_path / "a", tmp_path / "b"
    for folder in (run, other):
        folder.mkdir()
        (folder / "samples.jsonl.gz").touch()
        (folder / "results.json").write_text(json.dumps(evaluation("", "m", a=0.5).results))
    (run / "metrics.jsonl").write_text('{"step": 1, "tokens": 7}\n')
    folders = [run, tmp_path, other]
    monkeypatch.setattr(Path, "rglob", lambda path, name: [other / name, run / name])
    assert find_folders([tmp_path]) == [run, other]
    assert [e.path for e in evaluations.find_evaluations([tmp_path])] == [run, other]
    monkeypatch.undo()
    assert find_folders(folders) == [run, other]
    assert find_folders([other, run]) == [run, other]
    tables = results_table(folders)
    assert tables.count("95% interval") == 2
    assert tables.count("tokens (thousands)") == 1
    assert results_table([run, run]).splitlines()[2].split()[:2] == ["a", "1"]
    with pytest.raises(FileNotFoundError, match="no runs found"):
        find_folders([run, tmp_path / "none"])


def test_sections_of_evaluations() -> None:
    first = evaluation("one", "m", "n", "m", a=0.5, b=0.25, c=0.125)
    assert (first.model, first.baselines) == ("m, n", "old/m, old/n")
    del first.results["tasks"]["a"]["against"]
    (section,) = evaluations.sections([first])
    assert (section["path"], section["model"]) == ("one", "m, n")
    assert section["baselines"] == "old/n, old/m"
    assert section["columns"][-1] == "difference"
    assert [(name, split, cells[0]) for name, split, cells in section["rows"]] == [
        *(("a", False, "50.0"), ("hard", True, "25.0"), ("b", False, "25.0")),
        *(("hard", True, "25.0"), ("c", False, "12.5"), ("hard", True, "25.0")),
    ]
    texts = evaluations.evaluations_table([first, evaluation("two", "m", a=0.5)]).split("\n\n")
    assert [text.splitlines()[0] for text in texts] == ["one", "two"]


def test_evaluations_are_drawn_side_by_side(monkeypatch: Any) -> None:
    figures: list[Any] = []

    def figure(labels: list[str], height: float, axis: str, points: Any) -> str:
        figures.append((labels, height, draw(points)))
        return "png"

    monkeypatch.setattr(evaluations, "interval_figure", figure)
    both = [evaluation("one", "m", "m", a=0.5, b=0.25), evaluation("two", "m", "m", b=0.75, c=1)]
    assert {evaluations.draw(drawn) for drawn in (both, both[:1], both * 5)} == {"png"}
    (labels, height, axes), (_, lower, alone), (*_, many) = figures
    assert labels == ["a", "b", "c"]
    assert height == pytest.approx(0.9 + 0.7 + 0.9)
    assert lower == pytest.approx(0.6 + 0.35 + 0.9)
    lines = [points(line) for line in axes.lines]
    expected = [
        [],
        *([(50, 0.15)], [(37.5, 0.15), (75, 0.15)], [(25, -0.85)], [(12.5, -0.85), (50, -0.85)]),
        [],
        *([(75, -1.15)], [(62.5, -1.15), (100, -1.15)]),
        *([(100, -2.15)], [(87.5, -2.15), (125, -2.15)]),
    ]
    assert [len(line) for line in lines] == [len(line) for line in expected]
    for line, values in zip(lines, expected, strict=True):
        assert np.array(line) == pytest.approx(np.array(values))
    colors = [line.get_color() for line in (*axes.lines, many.lines[-1])]
    assert colors == [plots.COLORS[0]] * 5 + [plots.COLORS[1]] * 6
    assert [line.get_marker() for line in (axes.lines[1], many.lines[-2])] == ["o", "s"]
    assert (axes.get_ylim(), axes.get_xlim()) == ((-2.5, 0.5), (-1, 126))
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]
    assert legend._outside_loc == "lower"
    assert points(alone.lines[1]) == [(50, 0)]
    assert not alone.figure.legends


def interval_axes(low: float, high: float) -> Any:
    """The axes of a figure whose values span [low, high]."""
    kept: list[Any] = []

    def drawing(axes: Any) -> None:
        axes.set_xlim(low, high)
        kept.append(axes)

    image = evaluations.interval_figure(["a", "b"], 1.5, "accuracy, %", drawing)
    assert image == "data:image/svg+xml;base64,PHN2Zy8+"
    return kept[0]


@pytest.mark.parametrize(
    ("ends", "limits"),
    [
        ((40, 40.5), (39, 41.5)),
        ((0.1, 0.2), (-0.2, 1.2)),
        ((99.8, 100), (98.8, 100.2)),
        ((120, 120.5), (119, 121.5)),
        ((-50.4, -50.1), (-51.4, -49.1)),
        ((40, 41), (40, 41)),
    ],
)
def test_a_figure_of_nearly_equal_values_is_not_magnified(
    no_images: None, ends: tuple[float, float], limits: tuple[float, float]
) -> None:
    assert interval_axes(*ends).get_xlim() == pytest.approx(limits)


def test_the_axes_of_a_figure_of_intervals(no_images: None) -> None:
    axes = interval_axes(40, 41)
    assert axes.get_xlabel() == "accuracy, %"
    assert axes.get_yticks().tolist() == [0, -1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.figure.get_size_inches().tolist() == [7.2, 1.5]
    assert axes.xaxis.get_tick_params()["gridOn"]
    assert axes.yaxis.get_tick_params()["gridOn"]


def test_an_unknown_value_has_no_interval() -> None:
    axes = Figure().subplots()
    evaluations.draw_interval(axes, 2, None, None, "k")
    assert not axes.lines
    evaluations.draw_interval(axes, 2, 0.0, [0.0, 0.5], "k")
    assert [points(line) for line in axes.lines] == [[(0, 2)], [(0, 2), (50, 2)]]


def test_the_reward_of_each_source_follows_that_of_all(tmp_path: Path) -> None:
    """Only where the data name sources; two names never share a file."""
    columns = {"reward_mean": [0.1, 0.4], "reward_mean/a b": [0.0, 0.5], "reward_mean/a_b": [1, 1]}
    sourced = made_group("sourced", {"step": [1, 2], **columns})
    plain = made_group("plain", {"step": [1, 2], "reward_mean": [0.2, 0.3]})
    for group in (sourced, plain):
        vars(group.runs[0]).update(splits=[], tasks=[])
    rewards = [p for p in plots.training_panels([plain, sourced]) if "reward_mean" in p.column]
    assert [panel.column for panel in rewards] == [*columns]
    assert [panel.title for panel in rewards] == ["Reward", "Reward: a b", "Reward: a_b"]
    assert len({panel.key for panel in rewards}) == 3
    assert plots.training_panels([plain]) == [*plots.TRAINING]
    files = plots.draw_plots([plain, sourced], tmp_path)
    assert {p.key: p.key in files for p in rewards} == {
        "reward": True,
        "reward_1_a_b": True,
        "reward_2_a_b": False,  # 1 in all steps: a sentence in its place
    }
