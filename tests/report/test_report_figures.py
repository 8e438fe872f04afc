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


def test_a_panel_shows_bands_of_seeds_and_traces_of_single_runs() -> None:
    """Two seeds of the first group; one run each of the others, of which one lacks the column."""
    panel, nan = panel_of("response_length"), math.nan
    groups = [
        made_group(
            "seeds",
            {"step": [1, 2, 3], "completions/mean_length": [4, 6, 8]},
            {"step": [1, 2], "completions/mean_length": [8, 4]},
        ),
        made_group("without", {"step": [1, 2]}),
        made_group("single", {"step": [1, 2, 3, 4], "completions/mean_length": [1, nan, 2, 3]}),
    ]
    axes = draw(plots._draw_panel, panel, groups)
    mean, trace, line = axes.lines
    assert points(mean) == [(1, 6), (2, 5)]
    assert mean.get_label() == "seeds"
    assert points(trace) == points(line) == [(1, 1), (3, 2), (4, 3)]
    assert trace.get_alpha() < 0.5
    assert line.get_alpha() is None
    assert line.get_label() == "single"
    assert [x.get_color() for x in axes.lines] == [plots.COLORS[i] for i in (0, 2, 2)]
    assert [x.get_marker() for x in (mean, line)] == [plots.MARKERS[0], plots.MARKERS[2]]
    (filled,) = axes.collections
    extent = filled.get_paths()[0].get_extents()
    assert (extent.x0, extent.x1, extent.y0, extent.y1) == (1, 2, 4, 8)
    assert to_hex(filled.get_facecolor()[0]) == plots.COLORS[0].lower()
    assert filled.get_alpha() < 0.5
    assert (axes.get_title(loc="left") or axes.get_title()) == panel.title
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("tokens", "optimizer step")
    assert all(tick == int(tick) for tick in axes.get_xticks())
    # all smoothed lines and the middle 98% of the trace, 1.02 to 2.98, and 6% of the height
    assert axes.get_ylim() == pytest.approx((1 - 0.06 * 7, 8 + 0.06 * 7))
    assert axes.get_xlim() == pytest.approx((0.97, 4.03))
    axes = draw(plots._metric, panel, groups[2], 1, 3.0)
    assert points(axes.lines[0]) == [(1, 1), (3, 2), (4, 3)]
    assert [y for _, y in points(axes.lines[1])] == pytest.approx([1, 2.5 / 1.5, 4.25 / 1.75])
    assert axes.lines[1].is_dashed()
    assert not axes.lines[0].is_dashed()


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


def test_accuracies_and_exact_values_are_not_smoothed() -> None:
    steps = [*range(299)]
    values = [step % 2 for step in steps]
    columns = dict.fromkeys(("accuracy", "accuracy/+", "lr", "grad_norm"), values)
    group = made_group(
        "x",
        run := {
            "step": steps,
            **columns,
            "low": [x - 0.25 for x in values],
            "high": [x + 0.5 for x in values],
        },
    )
    title = " ".join("x" * length for length in (20, 21, 20, 22))  # lines of 42 characters
    panel = plots.Panel("k", title, "accuracy", "accuracy", "", "accuracy")
    axes = draw(plots._draw_panel, panel, [group])
    (line,) = axes.lines
    assert line.get_ydata().tolist() == values
    assert line.get_markevery() == (0, 12)
    (bars,) = axes.collections
    assert [x.tolist() for x in bars.get_segments()[:2]] == [
        [[0, -0.25], [0, 0.5]],
        [[1, 0.75], [1, 1.5]],
    ]
    assert to_hex(bars.get_color()[0]) == plots.COLORS[0].lower()
    assert bars.get_alpha() < 1
    assert not draw(plots._accuracy, replace(panel, column="accuracy/+"), group, 0, 1).collections
    (band,) = draw(plots._accuracy, panel, made_group("x", run, run), 0, 1).collections
    # no bars
    assert isinstance(band, PolyCollection)
    assert axes.get_ylim() == (-0.28, 1.53)
    assert [len(text) for text in axes.title.get_text().split("\n")] == [42, 20, 22]
    assert axes.yaxis.get_major_formatter()(0.25, 0) == "25%"
    exact, smoothed = (
        draw(plots._draw_panel, panel_of(key), [group]).lines[-1] for key in ("lr", "grad_norm")
    )
    assert exact.get_ydata().tolist() == values != smoothed.get_ydata().tolist()
    assert smoothed.get_ydata()[1] == pytest.approx(1 / (2 - 2 / (299 / 12 + 1)))
    axes = draw(plots._line, "x", [(np.arange(70.0), np.arange(70.0))], 3)
    assert axes.lines[0].get_markevery() == (6, 10)  # markers of different groups are offset


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


def test_the_figures_of_a_report(tmp_path: Path, monkeypatch: Any) -> None:
    drawn: dict[str, Any] = {}

    def write(figure: Any, path: Path) -> Path:
        drawn[path.name] = figure
        return path

    monkeypatch.setattr(plots, "_write", write)
    recorded = made_group(
        "x",
        {
            "step": [1, 2],
            "mu": [0.1, 0.2],
            "lr": [1, 2],
            "entropy": [3, 4],
            "accuracy": [0, 1],
            "accuracy/a+/1": [0, 1],
        },
    )
    other = made_group("y", {"step": [1, 2], "mu": [0.1, 0.2]})
    for run in (*recorded.runs, *other.runs):
        vars(run).update(splits=["a+/1"], tasks=[])
    files = plots.draw_plots([recorded], tmp_path)
    names = ["accuracy", "accuracy_1_a+_1", "entropy", "lr", "mu"]
    assert files == {name: tmp_path / f"{name}.svg" for name in names} | {
        "overview": tmp_path / "overview.png"
    }
    assert [drawn[f"{n}.svg"].get_size_inches().tolist() for n in names] == [
        [4.6, 3.5] if n.startswith("accuracy") else [5.6, 3.7] for n in names
    ]
    first, *_ = drawn["overview.png"].axes
    assert [axes.get_title("left") for axes in first.figure.axes] == [
        "Held-out accuracy",
        "Entropy",
        "Mixing weight μ",
    ]
    assert first.figure.get_layout_engine()
    assert first.figure.dpi == 160
    assert first.get_axisbelow()
    assert first.yaxis.get_tick_params()["gridOn"] > first.xaxis.get_tick_params()["gridOn"]
    panels = 2 * [panel for panel in (*plots.TRAINING, *plots.MIXING) if panel.key in files][:2]
    plots._draw_overview(panels, [recorded], tmp_path / "four.png")
    four = drawn["four.png"]
    assert [axes.axison for axes in four.axes] == [True] * 4 + [False] * 2
    assert four.get_size_inches() == pytest.approx([13.2, 6.1])
    plots._draw_overview(panels[:2], [recorded], tmp_path / "two.png")
    assert drawn["two.png"].get_size_inches() == pytest.approx([8.8, 3.2])
    assert not drawn["two.png"].legends
    assert not drawn["mu.svg"].legends
    assert plots.draw_plots([recorded, other], tmp_path) == files
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


def test_a_figure_of_nearly_equal_values_is_not_magnified(no_images: None) -> None:
    kept: list[Any] = []

    def draw_axes(low: float, high: float) -> Any:
        def drawing(axes: Any) -> None:
            axes.set_xlim(low, high)
            kept.append(axes)

        assert (
            evaluations.interval_figure(["a", "b"], 1.5, "accuracy, %", drawing)
            == "data:image/svg+xml;base64,PHN2Zy8+"
        )
        return kept[-1]

    for ends, limits in {
        (40, 40.5): (39, 41.5),
        (0.1, 0.2): (-0.2, 1.2),
        (99.8, 100): (98.8, 100.2),
        (120, 120.5): (119, 121.5),
        (-50.4, -50.1): (-51.4, -49.1),
    }.items():
        assert draw_axes(*ends).get_xlim() == pytest.approx(limits)
    axes = draw_axes(40, 41)
    assert axes.get_xlim() == (40, 41)
    assert axes.get_xlabel() == "accuracy, %"
    assert axes.get_yticks().tolist() == [0, -1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.figure.get_size_inches().tolist() == [7.2, 1.5]
    assert axes.xaxis.get_tick_params()["gridOn"]
    assert axes.yaxis.get_tick_params()["gridOn"]
    figure = Figure().subplots()
    evaluations.draw_interval(figure, 2, None, None, "k")
    assert not figure.lines
    evaluations.draw_interval(figure, 2, 0.0, [0.0, 0.5], "k")
    assert [points(line) for line in figure.lines] == [[(0, 2)], [(0, 2), (50, 2)]]
