"""TokenMoments: signals against a direct computation, exact merging over parts and ranks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from gac_kernels import LossOutput, Signals, TokenMoments, fused_gac_loss

from . import ranks

V = 13
LENGTHS = (5, 3, 7, 0, 2, 6, 4, 1, 5, 3, 6, 2)
DEMOS = (0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 0)


def batch(per_token: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [12, 7, V], targets, advantages and is_demo, the same in every process."""
    g = torch.Generator().manual_seed(3)
    rows, width = len(LENGTHS), max(LENGTHS)
    logits = 2 * torch.randn(rows, width, V, generator=g, dtype=torch.float64)
    targets = torch.randint(0, V, (rows, width), generator=g)
    targets[torch.arange(width) >= torch.tensor(LENGTHS)[:, None]] = -100
    advantages = torch.randn(rows, width, generator=g, dtype=torch.float64)
    if not per_token:
        advantages = advantages[:, 0]
    return logits, targets, advantages, torch.tensor(DEMOS, dtype=torch.bool)


def outputs(rows: list[int] | slice, per_token: bool = True) -> LossOutput:
    return fused_gac_loss(*(x[rows] for x in batch(per_token)), backend="reference")


def moments(rows: list[int] | slice) -> TokenMoments:
    found = outputs(rows).moments
    assert found is not None
    return found


def direct(trim: float, per_token: bool = True) -> Signals:
    """The paper's equations 7 to 9 on Python lists."""
    logits, targets, advantages, _ = batch(per_token)
    logps = logits.log_softmax(-1)
    nll, means, tokens = [], [], []
    for i, (length, demo) in enumerate(zip(LENGTHS, DEMOS, strict=True)):
        lp = [logps[i, t, targets[i, t]].item() for t in range(length)]
        if length == 0:
            continue
        if demo:
            nll.append(-sum(lp) / length)
            continue
        a = advantages[i, :length].tolist() if per_token else [advantages[i].item()] * length
        means.append(sum(a) / length)
        for x, r in zip(lp, a, strict=True):
            tokens.append((math.exp(x) * (1 - math.exp(x)), r, 1 / length))
    kept = sorted(nll)[math.floor(trim * len(nll)) : len(nll) - math.floor(trim * len(nll))]
    n = len(means)

    def scores(column: int) -> list[float]:
        mean = sum(t[column] * t[2] for t in tokens) / n
        deviation = math.sqrt(sum((t[column] - mean) ** 2 * t[2] for t in tokens) / n)
        return [(t[column] - mean) / deviation if deviation > 1e-6 else 0.0 for t in tokens]

    gaps = zip(scores(0), scores(1), (t[2] for t in tokens), strict=True)
    disagreement = sum((s - r) ** 2 * w for s, r, w in gaps) / n
    return Signals(statistics.pvariance(kept), statistics.pvariance(means), disagreement)


def assert_same(ours: Signals, other: Signals, rel: float = 1e-12) -> None:
    assert ours == pytest.approx(other, rel=rel, nan_ok=True)


@pytest.mark.parametrize("per_token", [True, False], ids=["per-token", "per-sequence"])
@pytest.mark.parametrize("trim", [0.0, 0.1, 0.2, 0.45])
def test_signals_equal_a_direct_computation(trim: float, per_token: bool) -> None:
    found = outputs(slice(None), per_token).moments
    assert found is not None
    assert_same(found.signals(trim), direct(trim, per_token), rel=1e-10)


SPLITS = {
    "one by one": [[i] for i in range(12)],
    "halves": [list(range(6)), list(range(6, 12))],
    "rollouts and demonstrations separate": [[0, 2, 3, 5, 8, 11], [1, 4, 6, 7, 9, 10]],
    "with an empty part": [[3], [0, 1, 2], [], [4, 5, 6, 7, 8, 9, 10, 11]],
}


@pytest.mark.parametrize("name", SPLITS)
def test_parts_add_up_to_the_whole(name: str) -> None:
    """Trimming is global: the parts' own trimmed variances could not be combined."""
    total = TokenMoments.zeros()
    for rows in SPLITS[name]:
        total = total + moments(rows)
    whole = moments(slice(None))
    assert_same(total.signals(0.2), whole.signals(0.2))
    assert total.kl.isnan() and total.rollout_tokens == whole.rollout_tokens == 25
    assert total.demo_tokens == whole.demo_tokens
    assert total.entropy.item() == pytest.approx(whole.entropy.item(), rel=1e-12)


def test_order_of_addition_does_not_matter() -> None:
    a, b, c = (moments(rows) for rows in ([0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11]))
    assert_same(((a + b) + c).signals(), (c + (b + a)).signals())


def test_a_large_mean_does_not_cancel() -> None:
    """Advantages 1e8 + x: sums of squares would lose x altogether."""
    logits, targets, advantages, is_demo = batch()
    shifted = [
        fused_gac_loss(
            logits[i : i + 1],
            targets[i : i + 1],
            advantages[i : i + 1] + shift,
            is_demo[i : i + 1],
            backend="reference",
        ).moments
        for shift in (0.0, 1e8)
        for i in range(12)
    ]
    plain, moved = sum(shifted[1:12], shifted[0]), sum(shifted[13:], shifted[12])
    assert_same(moved.signals(), plain.signals(), rel=1e-6)


def test_constant_coefficients_have_no_z_score() -> None:
    logits, targets, advantages, is_demo = batch()
    same = torch.ones_like(advantages)
    out = fused_gac_loss(logits, targets, same, is_demo, backend="reference")
    assert (
        out.moments.signals().disagreement == 1.0
    )  # from the z-scores of s alone; those of A are 0
    flat = fused_gac_loss(torch.zeros_like(logits), targets, same, is_demo, backend="reference")
    assert flat.moments.signals()[1:] == pytest.approx(
        (0.0, 0.0), abs=1e-20
    )  # the variance is 0 up to rounding


def test_without_one_kind_its_signals_are_nan() -> None:
    assert_same(
        moments([1, 4]).signals(), Signals(moments([1, 4]).signals()[0], math.nan, math.nan)
    )
    assert math.isnan(moments([0, 2]).signals().sft_variance)
    assert all(math.isnan(x) for x in TokenMoments.zeros().signals())
    assert all(math.isnan(x) for x in moments([3]).signals())  # one empty rollout


def test_a_broken_row_makes_its_signals_nan() -> None:
    """A NaN row is neither ignored nor trimmed as an outlier."""
    logits, targets, advantages, is_demo = batch()
    for row, signals in ((1, slice(0, 1)), (0, slice(2, 3))):
        broken = logits.clone()
        broken[row, 0, 0] = math.nan
        out = fused_gac_loss(broken, targets, advantages, is_demo, backend="reference")
        assert all(math.isnan(x) for x in out.moments.signals(0.2)[signals])


@pytest.mark.parametrize("trim", [-0.1, 0.5, math.nan])
def test_impossible_trim(trim: float) -> None:
    with pytest.raises(ValueError, match=f"trim={trim}"):
        moments(slice(None)).signals(trim)


def test_moments_off() -> None:
    out = fused_gac_loss(*batch(), moments=False, backend="reference")
    assert out.moments is None


def test_to_moves_every_part() -> None:
    there = moments(slice(None)).to("meta")
    assert {there.rollouts.device.type, there.demo_nll.device.type, there.totals.device.type} == {
        "meta"
    }


def test_all_reduce_alone_is_the_identity() -> None:
    own = moments(slice(None))
    assert own.all_reduce() is own


PARTS = {
    2: [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]],  # unequal counts
    3: [
        [0, 2, 3, 5, 8, 11],
        [1, 4, 6, 7],
        [9, 10],
    ],  # some ranks hold only one kind of row; unequal counts
}


def merged(parts: list[list[int]]) -> tuple[Signals, list[float]]:
    """Signals and token counts on a rank after the all-reduce."""
    torch.distributed.init_process_group("gloo")
    found = moments(parts[torch.distributed.get_rank()]).all_reduce()
    return found.signals(0.2), found.totals[:2].tolist()


@pytest.mark.dist
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_agree_with_one_process(count: int) -> None:
    found, whole = ranks.run(merged, PARTS[count], ranks=count), moments(slice(None))
    for signals, counts in found:
        assert_same(signals, whole.signals(0.2))
        assert counts == whole.totals[:2].tolist()
    assert len({tuple(signals) for signals, _ in found}) == 1  # bit for bit on every rank
