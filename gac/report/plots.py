"""The report's figures: faint raw traces, bold smoothed lines and bands over seeds.

Figures are drawn without pyplot, to avoid GUI backends and global state.
"""

import base64
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .groups import Group
from .health import field
from .statistics import band, finite, smooth

# Okabe and Ito's color-blind-safe palette. Line styles and markers differ too, so that groups are
# distinguishable in grayscale.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F")
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2), (10, 3), (4, 1.5, 1, 1.5, 1, 1.5))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, RULE = "#1b1b1b", "#d9d9d9"
SIZE, SMALL = (5.6, 3.7), (4.6, 3.5)  # inches; the second fits three in a row
REWARD = "reward_mean/"  # prefix of the columns with the reward of each source
TITLE_WIDTH = 42  # characters that fit on a title line at the small size

STYLE: Any = {
    "figure.constrained_layout.use": True,
    "figure.dpi": 160,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same figures on every machine
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": "#8a8a8a",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.direction": "out",
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.hashsalt": "gac",  # the same file for the same run
}


@dataclass(frozen=True)
class Panel:
    """One figure of the page."""

    key: str
    """File name without .svg."""
    title: str
    axis: str
    """Label of the vertical axis."""
    column: str
    """Field of metrics.jsonl, or of eval.jsonl if `kind` is accuracy or evaluation."""
    caption: str
    """Explanation below the figure."""
    kind: str = "metric"
    """metric (smoothed), exact (not smoothed), mu (with prior and mu*), accuracy or evaluation
    (points of eval.jsonl; the former with intervals, from 0 to 1).
    """
    rounding: float = 0.0
    """Values up to this size are treated as 0."""
    zero: str = ""
    """Why the values can be 0 by construction, for a sentence in place of the figure."""


TRAINING = (
    Panel(
        key="reward",
        title="Reward",
        axis="mean reward",
        column="reward_mean",
        caption="Mean reward of the sampled responses; with rewards of 0 and 1 this is their "
        "accuracy.",
    ),
    Panel(
        key="response_length",
        title="Response length",
        axis="tokens",
        column="completions/mean_length",
        caption="Mean length of the sampled responses.",
    ),
    Panel(
        key="entropy",
        title="Entropy",
        axis="nats per token",
        column="entropy",
        caption="Mean entropy of the policy's next-token distribution; near 0 the policy does not "
        "explore.",
    ),
    Panel(
        key="policy_loss",
        title="Policy loss",
        axis="loss",
        column="rollout_loss",
        caption="The policy-gradient term only. Large swings indicate instability; its level says "
        "little.",
        rounding=1e-6,
        zero="by construction, with one update per rollout and advantages that sum to 0",
    ),
)
OPTIMIZATION = (
    Panel(
        key="demo_loss",
        title="Demonstration loss",
        axis="loss",
        column="demo_loss",
        caption="The demonstration term. With the weight phi (method.weight=phi) it can rise while "
        "the model learns: tokens that the model finds unlikely have almost no weight at first.",
    ),
    Panel(
        key="teacher_loss",
        title="Teacher's loss",
        axis="nats",
        column="teacher_loss",
        caption="Divergence of policy and teacher on the rollouts, before its weight.",
    ),
    Panel(
        key="grad_norm",
        title="Gradient norm",
        axis="norm",
        column="grad_norm",
        caption="Before clipping.",
    ),
    Panel(
        key="lr",
        title="Learning rate",
        axis="learning rate",
        column="lr",
        caption="After warm-up and decay.",
        kind="exact",
    ),
    Panel(
        key="frac_reward_zero_std",
        title="Groups without signal",
        axis="share of prompts",
        column="frac_reward_zero_std",
        caption="Prompts whose rollouts all have the same reward: they teach nothing in this step.",
    ),
)
MIXING = (
    Panel(
        key="mu",
        title="Mixing weight μ",
        axis="weight of the SFT term",
        column="mu",
        caption="μ bold, its prior schedule dotted, the closed-form target μ* as faint dots.",
        kind="mu",
    ),
    Panel(
        key="sft_variance",
        title="SFT variance σₛ²",
        axis="nats²",
        column="sft_variance",
        caption="Trimmed variance of the demonstrations' mean negative log-likelihood.",
    ),
    Panel(
        key="rl_variance",
        title="RL variance σᵣ²",
        axis="advantage²",
        column="rl_variance",
        caption="Variance of the rollouts' advantages.",
    ),
    Panel(
        key="disagreement",
        title="Disagreement Δg̃²",
        axis="squared z-score",
        column="disagreement",
        caption="Distance between the two per-token signals; 2 means that they are uncorrelated.",
    ),
)


def evaluation_panels(groups: Sequence[Group]) -> list[Panel]:
    """Panels of the overall accuracy, each split, each additional task and each of its splits."""
    splits = list(dict.fromkeys(split for group in groups for split in group.splits))
    tasks = list(dict.fromkeys(task for group in groups for task in group.tasks))
    caption = (
        "Fraction of held-out problems solved at each evaluation; step 0 is the initial model."
    )
    panels = [
        Panel(
            key="accuracy",
            title="Held-out accuracy",
            axis="accuracy",
            column="accuracy",
            caption=caption,
            kind="accuracy",
        )
    ]
    for number, split in enumerate(splits, 1):
        caption, title = _caption(split, tasks), f"Held-out accuracy: {split.replace('/', ': ')}"
        panels.append(
            Panel(
                key=_file_name("accuracy", number, split),
                title=title,
                axis="accuracy",
                column=f"accuracy/{split}",
                caption=caption,
                kind="accuracy",
            )
        )
    shown = panels[1:] if tasks and not has_data(panels[0], groups) else panels
    losses = [
        Panel(
            key="demo_nll" if not task else f"demo_nll_{number}",
            title=f"Held-out demonstration loss{f': {task}' if task else ''}",
            axis="nats per token",
            column=f"demo_nll/{task}" if task else "demo_nll",
            caption="Mean negative log-likelihood of the held-out reference solutions, per token. "
            "It falls as the model learns to imitate them, also while the accuracy is still 0.",
            kind="evaluation",
        )
        for number, task in enumerate(["", *tasks])
    ]
    return [*shown, *(panel for panel in losses if has_data(panel, groups))]


def training_panels(groups: Sequence[Group]) -> list[Panel]:
    """Panels of the training, with the reward on the prompts of each source after that on all."""
    columns = [name for group in groups for run in group.runs for name in run.metrics]
    sources = dict.fromkeys(
        name.removeprefix(REWARD) for name in columns if name.startswith(REWARD)
    )
    rewards = [
        Panel(
            key=_file_name("reward", number, source),
            title=f"Reward: {source}",
            axis="mean reward",
            column=f"{REWARD}{source}",
            caption=f"The same for the prompts of the source “{source}” only.",
        )
        for number, source in enumerate(sources, 1)
    ]
    return [TRAINING[0], *rewards, *TRAINING[1:]]


def _file_name(kind: str, number: int, name: str) -> str:
    """Numbered, so that no two names share a file."""
    return f"{kind}_{number}_" + "".join(c if c.isalnum() or c in "+-" else "_" for c in name)


def _caption(split: str, tasks: Sequence[str]) -> str:
    """Caption of the panel for a split or an additional task."""
    if split in tasks:
        return (
            f"Fraction of problems solved in the additional task “{split}”: how training affects "
            "an ability that it does not target."
        )
    task, _, part = split.partition("/")
    if task in tasks:
        return f"The same for the split “{part}” of the additional task “{task}”."
    return f"The same for the split “{split}” only."


def group_style(index: int) -> dict[str, Any]:
    """How lines of the index-th group look, as matplotlib keyword arguments."""
    dashes = DASHES[index % len(DASHES)]
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": (0, dashes) if dashes else "-",
        "marker": MARKERS[index % len(MARKERS)],
        "linewidth": 2.0,
        "markersize": 5,
        "markeredgecolor": "white",
    }


def has_data(panel: Panel, groups: Sequence[Group]) -> bool:
    """Whether any run recorded the panel's column."""
    return any(_curves(group, panel) for group in groups)


def unchanging(panel: Panel, groups: Sequence[Group]) -> str | None:
    """A sentence in place of a figure without information; None for one that shows something.

    A figure shows nothing if the values of every run are rounding errors of 0, or never change.
    """
    if panel.kind in ("accuracy", "evaluation"):
        return None
    curves = [(group.label, values) for group in groups for _, values in _curves(group, panel)]
    if all(len(values) < 2 for _, values in curves):
        return None
    largest = max(float(np.abs(values).max()) for _, values in curves)
    if panel.zero and largest <= panel.rounding:
        return f"{panel.title}: 0 up to rounding ({largest:.1g}); {panel.zero}."
    if any(np.ptp(values) > 0 for _, values in curves):
        return None
    by_label = {label: f"{values[0]:.3g}" for label, values in curves}
    if len({*by_label.values()}) == 1:
        return f"{panel.title}: {next(iter(by_label.values()))} in all steps."
    return f"{panel.title}: {', '.join(f'{x} in {label}' for label, x in by_label.items())}."


def draw_plots(groups: Sequence[Group], out: Path) -> dict[str, Path]:
    """Write one SVG per panel that shows something; returns panel key -> file.

    overview.png shows all but the optimization panels and the parts of accuracies and rewards.
    """
    from matplotlib import rc_context

    out.mkdir(parents=True, exist_ok=True)
    panels = [*evaluation_panels(groups), *training_panels(groups), *OPTIMIZATION, *MIXING]
    panels = [p for p in panels if has_data(p, groups) and unchanging(p, groups) is None]
    with rc_context(STYLE):
        files = {panel.key: _draw_single(panel, groups, out) for panel in panels}
        overall = [
            panel
            for panel in panels
            if panel not in OPTIMIZATION and not panel.column.startswith(("accuracy/", REWARD))
        ]
        if overall:
            files["overview"] = _draw_overview(overall, groups, out / "overview.png")
    return files


def _draw_single(panel: Panel, groups: Sequence[Group], out: Path) -> Path:
    from matplotlib.figure import Figure

    size = SMALL if panel.kind == "accuracy" else SIZE
    figure = Figure(figsize=size)
    axes = figure.subplots()
    _draw_panel(axes, panel, groups)
    _legend(figure, groups)
    return _write(figure, out / f"{panel.key}.svg")


def _draw_overview(panels: Sequence[Panel], groups: Sequence[Group], path: Path) -> Path:
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.4 * columns, 2.9 * rows + 0.3))
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, groups)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _legend(figure, groups)
    return _write(figure, path)


def _draw_panel(axes: Any, panel: Panel, groups: Sequence[Group]) -> None:
    draw: dict[str, Callable] = {"mu": _mu, "accuracy": _accuracy, "evaluation": _accuracy}
    span = 1.0 if panel.kind in ("exact", "evaluation") else smoothing_span(groups)
    for index, group in enumerate(groups):
        draw.get(panel.kind, _metric)(axes, panel, group, index, span)
    axes.set_title(textwrap.fill(panel.title, TITLE_WIDTH))
    axes.set_ylabel(panel.axis)
    axes.set_xlabel("optimizer step")
    axes.margins(x=0.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if panel.kind in ("mu", "accuracy"):
        axes.set_ylim(min(0, axes.dataLim.y0) - 0.03, max(1, axes.dataLim.y1) + 0.03)
    else:
        _fit_height(axes, panel, groups, span)
    if panel.kind == "accuracy":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")


def _metric(axes: Any, panel: Panel, group: Group, index: int, span: float) -> None:
    raw = _curves(group, panel)
    if len(raw) == 1:
        axes.plot(*raw[0], color=group_style(index)["color"], alpha=0.18, linewidth=0.8)
    _line(axes, group.label, _smoothed(raw, span), index)


def _mu(axes: Any, panel: Panel, group: Group, index: int, span: float) -> None:
    color = group_style(index)["color"]
    dots: Any = {"linestyle": "", "marker": ".", "markersize": 3, "markeredgewidth": 0}
    styles = {"prior": {"linestyle": ":", "linewidth": 1.3}, "mu_star": {"alpha": 0.35, **dots}}
    for column, style in styles.items():
        steps, mean, _, _ = band(_curves(group, panel, column))
        axes.plot(steps, mean, color=color, **style)
    _line(axes, group.label, _curves(group, panel), index)


def _accuracy(axes: Any, panel: Panel, group: Group, index: int, span: float) -> None:
    curves = _curves(group, panel)
    _line(axes, group.label, curves, index, markers=24)
    ends = [_curves(group, panel, end) for end in ("low", "high")]
    if panel.column == "accuracy" and len(curves) == 1:
        for (steps, low), (_, high) in zip(*ends, strict=True):
            axes.vlines(steps, low, high, color=group_style(index)["color"], alpha=0.55)


def _line(axes: Any, label: str, curves: Sequence, index: int, markers: int = 7) -> None:
    """Draw a group's bold line, with a band from its lowest to its highest seed."""
    steps, mean, low, high = band(curves)
    if not len(steps):
        return
    style = group_style(index)
    every = max(1, len(steps) // markers)
    start = (index * every // 5) % every  # offset the markers of different groups
    if len(curves) > 1:
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.16, linewidth=0)
    axes.plot(
        steps,
        mean,
        label=label,
        markevery=(start, every),
        markeredgewidth=0.7,
        **style,
    )


def _fit_height(axes: Any, panel: Panel, groups: Sequence[Group], span: float) -> None:
    """Scale the y-axis to show all smoothed lines and the middle 98% of the raw traces."""
    curves = [_curves(group, panel) for group in groups]
    lines = [values for curve in curves for _, values in _smoothed(curve, span)]
    raw = [values for curve in curves if len(curve) == 1 for _, values in curve]
    shown = [np.concatenate(lines)] + [np.quantile(values, (0.01, 0.99)) for values in raw]
    low, high = min(x.min() for x in shown), max(x.max() for x in shown)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    axes.set_ylim(low - margin, high + margin)


def _curves(group: Group, panel: Panel, column: str = "") -> list[tuple[np.ndarray, np.ndarray]]:
    """(steps, finite values) of each run of the group that recorded the column."""
    name = column or panel.column
    evaluated = panel.kind in ("accuracy", "evaluation")
    sources = [run.evals if evaluated else run.metrics for run in group.runs]
    curves = [finite(columns["step"], field(columns, name)) for columns in sources]
    return [(steps, values) for steps, values in curves if len(steps)]


def _smoothed(curves: Sequence[tuple[np.ndarray, np.ndarray]], span: float) -> list:
    return [(steps, smooth(values, span)) for steps, values in curves]


def smoothing_span(groups: Sequence[Group]) -> float:
    """Smoothing span in steps: a twelfth of the longest run."""
    return max(1.0, max(run.steps_done for group in groups for run in group.runs) / 12)


def _legend(figure: Any, groups: Sequence[Group]) -> None:
    """Name the groups below the figure, unless there is only one."""
    from matplotlib.lines import Line2D

    if len(groups) == 1:
        return
    labels = [group.label for group in groups]
    handles = [Line2D([], [], **group_style(i)) for i in range(len(groups))]
    characters = 12 * figure.get_figwidth()  # that fit side by side at this font size
    label_width = max(map(len, labels)) + 9  # 9 for the line sample before each label
    columns = max(1, int(characters / label_width))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        handlelength=3.4,
        columnspacing=1.6,
    )


def _write(figure: Any, path: Path) -> Path:
    partial = path.with_suffix(".partial")
    save(figure, partial, path.suffix[1:])
    return partial.replace(path)


def save(figure: Any, file: Any, kind: str = "svg") -> None:
    """Write a figure to a path or an open file; an SVG does not contain the date."""
    options = {"metadata": {"Date": None, "Creator": None}} if kind == "svg" else {}
    figure.savefig(file, format=kind, **options)


def embedded(svg: bytes) -> str:
    """The URL of an image that the page itself contains."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"
