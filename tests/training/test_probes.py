"""The probes of a step: gradients of parts, the sampled KL, sketches and sums, by hand."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gac.data.rows import Counts, Row, TermPair, collate
from gac.methods.base import Mix, StepNeeds
from gac.parallel import collectives
from gac.training import probes as parts_module
from gac.training.gradients import SampledKL, Totals
from gac.training.probes import GradientParts, UnitSketches
from gac.training.step import Rewards, Step
from gac_kernels import TokenMoments

COUNTS = Counts(rollouts=8, rollout_tokens=20, demos=6, demo_tokens=30, rows=14, tokens=99)
STEP = Step(3, (), Mix(0.3, 4.0), COUNTS, Rewards(0, 0, 0), StepNeeds(sketch=8), (), seed=1)


def row(length: int = 3, demo: bool = False, **fields: Any) -> Row:
    return Row((5,) * length, 1, demo, **{"advantage": 1.0, **fields})


def numbered(*names: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(2))) for name in names]


@pytest.mark.parametrize("average", [0.0, 0.25])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_the_parts_of_each_term(monkeypatch, average: float, bias: bool) -> None:
    """Five demonstrations and two rollouts in two parts each, on one of three ranks."""
    monkeypatch.setattr(parts_module, "copies", lambda gradient: 3 * gradient.numel() // 2)
    monkeypatch.setattr(parts_module, "all_reduce_sum", lambda x: 3 * x)
    parameters = numbered("shared", "lone", "unused")
    shared, lone, unused = (p for _, p in parameters)
    demos, rollouts = [row(demo=True, sequence=i) for i in range(5)], [row(), row(4)]
    live = [*demos[:1], *demos[2:], *rollouts]
    calls: list = []
    values = [1.0, 2.0, 3.0, 5.0, 7.0, 11.0]

    def accumulate(part: list[Row], mix: Mix, plain: bool) -> None:
        value = values[len(calls)]
        assert shared.grad is lone.grad is None
        calls.append((part, mix, plain))
        shared.grad = torch.tensor([value, 1.0])
        if mix.mu:
            lone.grad = torch.tensor([0.0, value])

    needs = StepNeeds(parts=2, bias=bias, average=average)
    parts = GradientParts(parameters, needs)
    tracked = {f"{i}.{n}": torch.full((2,), 4.0) for i in range(4) for n, _ in parameters}
    before = {name: x.clone() for name, x in tracked.items()}
    mixed = [demos[0], rollouts[0], *demos[1:4], rollouts[1], demos[4]]
    gram, bias_gram = parts.measure(mixed, live, accumulate, tracked)
    plain = [(demos[:1] + demos[2:], Mix(1.0), True), (rollouts, Mix(0.0), True)]
    assert calls == [
        (demos[:1], Mix(1.0, 2.0), False),
        (demos[2:], Mix(1.0, 2.0), False),
        (rollouts[:1], Mix(0.0, 2.0), False),
        (rollouts[1:], Mix(0.0, 2.0), False),
        *(plain if bias else []),
    ]

    def vectors(scale: float, old: float) -> Tensor:
        """shared, lone, unused: one row per part."""
        rows = [[v, 1, 0, v * d, 0, 0] for v, d in zip(values, (1, 1, 0, 0, 1, 0), strict=True)]
        return scale * torch.tensor(rows, dtype=torch.float64) + old

    now = vectors(average or 1.0, 3.0 if average else 0.0)[:4]
    torch.testing.assert_close(gram, now @ now.T)
    assert gram.dtype == torch.float64
    if bias:
        g = vectors(1.0, 0.0)
        pairs = torch.stack([(g[0] + g[1]) / 2, (g[2] + g[3]) / 2, g[4], g[5]])
        torch.testing.assert_close(bias_gram, pairs @ pairs.T)
    else:
        assert bias_gram is None
    assert all(torch.equal(tracked[name], x) for name, x in before.items())
    assert parts.averages.keys() == (tracked.keys() if average else set())
    kept = {name: x.clone() for name, x in parts.averages.items()}
    assert parts.combine_pair((0.5, 4.0), Mix(0.9)) == Mix(0.5 / 4.5, 4.5)
    expected = torch.tensor([0.25, 0.25, 2.0, 2.0], dtype=torch.float64) @ now
    grads = torch.cat([torch.zeros(2) if p.grad is None else p.grad for _, p in parameters])
    torch.testing.assert_close(grads.double(), expected)
    assert average or unused.grad is None
    assert all(torch.equal(parts.averages[name], x) for name, x in kept.items()) and not parts.parts


def test_parts_without_weight_leave_no_gradient() -> None:
    """A gradient of zeros would still move AdamW, whose moments are not 0."""
    for weights, expected in (((0.0, 0.0), None), ((1.0, -1.0), -3.0), ((0.0, 2.0), 10.0)):
        parameters = numbered("both", "one")
        parts = GradientParts(parameters, StepNeeds(parts=1))
        (_, both), (_, one) = parameters
        for value in (2.0, 5.0):
            both.grad = torch.full((2,), value)
            one.grad = torch.ones(2) if value == 2 else None
            parts.take()
        parts.combine(weights)
        assert both.grad is None if expected is None else both.grad.tolist() == [expected] * 2
        assert one.grad is None if weights[0] == 0 else one.grad.tolist() == [1, 1]


def test_gradients_that_are_not_finite_do_not_enter_the_averages() -> None:
    parameters = numbered("w")
    parts = GradientParts(parameters, StepNeeds(parts=1, average=0.5))

    def accumulate(part: list[Row], mix: Mix, plain: bool) -> None:
        parameters[0][1].grad = torch.tensor([1.0, math.inf if mix.mu else 1.0])

    gram, _ = parts.measure([], [], accumulate, {})
    assert not gram.isfinite().all() and gram[1, 1] == 2 and parts.averages == {}


def test_the_sampled_kl_by_hand(monkeypatch) -> None:
    """Two of three rollouts: gaps log 2, 0, -log 4 of three tokens; another rank has 0.5 of 2."""
    rows = (
        row(demo=True, sequence=-1),
        row(sequence=0),
        row(2, sequence=1),
        row(4, switch=2, sequence=3),
        row(4, sequence=2),
    )
    step = replace(STEP, number=4, rows=rows)
    chosen: list = []

    def row_logprobs(picked: list[Row], model: str) -> list[Tensor]:
        chosen.extend(r.sequence for r in picked)
        assert model == "reference"
        return [torch.arange(len(r.ids) - 1.0) - 1 for r in picked]

    passes = SimpleNamespace(
        reference_model=lambda: contextlib.nullcontext("reference"), row_logprobs=row_logprobs
    )
    kl = SampledKL(passes, step, 2)
    assert chosen == [1, 2]  # (4 + 0) % 3 and (4 + 1 * 3 // 2) % 3
    assert kl.sums.dtype == torch.float64 and math.isnan(kl.mean())
    batch = collate(rows, 0)
    gaps = {0: [9.0, 9.0], 1: [math.log(2)], 2: [0.0, -math.log(4), math.log(3)], 3: [9.0] * 3}
    logps = torch.zeros(batch.targets.shape)
    for i, r in enumerate(rows):
        for t, gap in enumerate(gaps.get(r.sequence, [9.0] * 2)):
            logps[i, t] = t - 1 - gap
    kl.add(batch, rows, SimpleNamespace(logps=logps))
    kl.add(collate([], 0), [], SimpleNamespace(logps=torch.zeros(1, 1)))
    expected = (2 - math.log(2) - 1) + (0.25 + math.log(4) - 1) + (3 - math.log(3) - 1)
    assert kl.sums.tolist() == pytest.approx([expected, 4], rel=1e-6)
    monkeypatch.setattr(collectives, "total", lambda sums: [sums[0] + 0.5, sums[1] + 2])
    assert kl.mean() == pytest.approx((expected + 0.5) / 6, rel=1e-6)
    assert len(SampledKL(passes, step, 9).reference) == 3


def test_sketches_are_summed_by_unit_over_the_ranks(monkeypatch) -> None:
    """Rollouts of unit 7 and 0 on this rank, of 7 and 3 on another; demonstrations stay single."""
    sketches = UnitSketches(1)
    out = lambda *values: SimpleNamespace(sketch=torch.tensor(values)[:, None, None])  # noqa: E731 - a fake
    sketches.add(None, [], out(99.0))
    sketches.add(None, [row(unit=7), row(demo=True, unit=7)], out(1.0, 2.0))
    sketches.add(None, [row(demo=True), row(unit=0), row(unit=7)], out(4.0, 8.0, 16.0))
    sketches.add(None, [row()], SimpleNamespace(sketch=None))
    other = [([-1], torch.tensor([[32.0]])), ([7, 3], torch.tensor([[64.0], [128.0]]))]
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "gather", lambda own: [own, other])
    gathered = sketches.gathered()
    assert gathered.demos.tolist() == [[1], [2], [16]] and gathered.demos.dtype == torch.float64
    assert gathered.rollouts.tolist() == [[(1 + 16 + 64) / 2], [4], [64]]
    monkeypatch.setattr(collectives, "gather", lambda own: [own])
    assert [x.shape for x in UnitSketches(3).gathered()] == [(0, 9)] * 2


def test_the_totals_of_a_step(monkeypatch) -> None:
    totals = Totals()
    assert totals.losses() == TermPair(0.0, 0.0)
    assert totals.moments(torch.device("meta")).totals.is_meta

    def out(demo: float, rollout: float, sequences: int) -> Any:
        moments = replace(TokenMoments.zeros(), demo_nll=torch.full((sequences,), demo))
        pair = torch.tensor(demo), torch.tensor(rollout)
        return SimpleNamespace(demo_loss=pair[0], rollout_loss=pair[1], moments=moments)

    a, b, c = (row(source=name) for name in "abc")
    totals.add(None, [a, b], out(1.0, 2.0, 4))  # two sequences per row
    totals.add(None, [], out(0.0, 0.0, 1))
    totals.add(None, [c, a], out(4.0, 8.0, 2))
    assert totals.losses() == TermPair(demo=5.0, rollout=10.0)
    assert totals.moments(torch.device("cpu")).demo_nll.tolist() == [1, 1, 1, 1, 0, 4, 4]
    gathered = [["x"], []]
    monkeypatch.setattr(collectives, "gather", lambda own: [own, *gathered])
    names = ("a", "a", "b", "b", "", "c", "a")
    assert totals.sources() == (*names, "x", *[""] * 6, *[""] * 7)
    gathered[0] = ["x"] * 9
    assert totals.sources() == (*names, "", "", *["x"] * 9, *[""] * 9)
    monkeypatch.setattr(collectives, "mean", lambda values: [x / 4 for x in values])
    assert totals.losses() == TermPair(demo=1.25, rollout=2.5)
