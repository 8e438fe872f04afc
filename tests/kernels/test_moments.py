"""TokenMoments: signals against a direct computation, and merging over parts and ranks."""

import dataclasses
import math
import statistics

import pytest
import torch
from torch import Tensor

from gac_kernels import Signals, TokenMoments, fused_gac_loss
from tests import ranks

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


def moments(rows: list[int] | slice, per_token: bool = True) -> TokenMoments:
    inputs = (x[rows] for x in batch(per_token))
    moments = fused_gac_loss(*inputs, backend="reference", mu=0.5).moments
    assert moments is not None
    return moments


def direct(trim: float, per_token: bool = True) -> Signals:
    """Compute the signals with the paper's equations 7 to 9 on Python lists."""
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
    return Signals(
        statistics.pvariance(kept),
        statistics.pvariance(means),
        sum((s - r) ** 2 * w for s, r, w in gaps) / n,
    )


def assert_same(actual: Signals, expected: Signals, rel: float = 1e-12) -> None:
    assert actual == pytest.approx(expected, rel=rel, nan_ok=True)


@pytest.mark.parametrize("per_token", [True, False], ids=["per-token", "per-sequence"])
@pytest.mark.parametrize("trim", [0.0, 0.1, 0.2, 0.45])
def test_signals_equal_a_direct_computation(trim: float, per_token: bool) -> None:
    assert_same(moments(slice(None), per_token).signals(trim), direct(trim, per_token), rel=1e-10)


@pytest.mark.parametrize("squares", [(1e-12, 1.0), (1.0, 1e-12)])
def test_a_signal_that_is_constant_up_to_rounding_counts_as_0(squares: tuple) -> None:
    """A variance of at most 1e-12: the other signal's z-scores, with a mean square of 1, remain."""
    rollouts = torch.tensor([1.0, 0, 0, *squares, 1e-6, 4], dtype=torch.float64)
    signals = dataclasses.replace(moments([0, 1]), rollouts=rollouts).signals(0.0)
    assert (signals.rl_variance, signals.disagreement) == (4.0, 1.0)


SPLITS = {
    "one by one": [[i] for i in range(12)],
    "halves": [list(range(6)), list(range(6, 12))],
    "rollouts and demonstrations separate": [[0, 2, 3, 5, 8, 11], [1, 4, 6, 7, 9, 10]],
    "with an empty part": [[3], [0, 1, 2], [], [4, 5, 6, 7, 8, 9, 10, 11]],
}


@pytest.mark.parametrize("name", SPLITS)
def test_sum_of_parts_equals_the_full_batch(name: str) -> None:
    """Trimming is global: the trimmed variances of the parts could not be combined."""
    total = TokenMoments.zeros()
    for rows in SPLITS[name]:
        total = total + moments(rows)
    full = moments(slice(None))
    assert_same(total.signals(0.2), full.signals(0.2))
    assert total.kl.isnan()
    assert total.rollout_tokens == full.rollout_tokens == 25
    assert total.demo_tokens == full.demo_tokens
    assert total.entropy.item() == pytest.approx(full.entropy.item(), rel=1e-12)


def test_order_of_addition_does_not_matter() -> None:
    a, b, c = (moments(rows) for rows in ([0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11]))
    assert_same(((a + b) + c).signals(), (c + (b + a)).signals())


def test_large_mean_causes_no_cancellation() -> None:
    """With advantages 1e8 + x, sums of squares would lose x completely."""
    logits, targets, advantages, is_demo = batch()

    def signals(shift: float) -> Signals:
        total = TokenMoments.zeros()
        for i in range(12):
            row = (x[i : i + 1] for x in (logits, targets, advantages + shift, is_demo))
            total = total + fused_gac_loss(*row, backend="reference", mu=0.5).moments
        return total.signals()

    assert_same(signals(1e8), signals(0.0), rel=1e-6)


def test_constant_coefficients_have_no_z_score() -> None:
    logits, targets, advantages, is_demo = batch()
    ones = torch.ones_like(advantages)
    out = fused_gac_loss(logits, targets, ones, is_demo, backend="reference", mu=0.5)
    # only from the z-scores of s; those of A are 0
    assert out.moments.signals().disagreement == 1.0
    out = fused_gac_loss(
        torch.zeros_like(logits), targets, ones, is_demo, backend="reference", mu=0.5
    )
    _, rl_variance, disagreement = out.moments.signals()
    assert (rl_variance, disagreement) == pytest.approx((0.0, 0.0), abs=1e-20)


@pytest.mark.parametrize(
    ("squares", "dot", "disagreement"),
    [((3.0, 3.0), 3.0, 0.0), ((498 / 7, 1162.0), -math.sqrt(498 / 7 * 1162), 4.0)],
)
def test_disagreement_of_parallel_coefficients_is_exact(squares, dot, disagreement) -> None:
    """In floating point, the cosine of these is above 1, or below -1."""
    assert abs(dot / math.sqrt(squares[0]) / math.sqrt(squares[1])) > 1
    rollouts = torch.tensor([2.0, 0.0, 0.0, *squares, dot, 5.0], dtype=torch.float64)
    signals = dataclasses.replace(TokenMoments.zeros(), rollouts=rollouts).signals()
    assert (signals.rl_variance, signals.disagreement) == (2.5, disagreement)


def test_signals_of_an_absent_kind_of_row_are_nan() -> None:
    demos_only = moments([1, 4]).signals()
    assert_same(demos_only, Signals(demos_only.sft_variance, math.nan, math.nan))
    assert math.isfinite(demos_only.sft_variance)
    assert math.isnan(moments([0, 2]).signals().sft_variance)
    assert all(math.isnan(x) for x in TokenMoments.zeros().signals())
    assert all(math.isnan(x) for x in moments([3]).signals())  # one empty rollout


def test_nan_row_makes_its_signals_nan() -> None:
    """A nan row is neither ignored nor trimmed as an outlier."""
    logits, targets, advantages, is_demo = batch()
    for row, signals in ((1, slice(0, 1)), (0, slice(2, 3))):
        poisoned = logits.clone()
        poisoned[row, 0, 0] = math.nan
        out = fused_gac_loss(poisoned, targets, advantages, is_demo, backend="reference", mu=0.5)
        assert all(math.isnan(x) for x in out.moments.signals(0.2)[signals])


@pytest.mark.parametrize("trim", [-0.1, 0.5, math.nan])
def test_invalid_trim_is_rejected(trim: float) -> None:
    with pytest.raises(ValueError, match=f"trim={trim}"):
        moments(slice(None)).signals(trim)


def test_moments_off_on_another_device_and_without_a_process_group() -> None:
    assert fused_gac_loss(*batch(), moments=False, backend="reference", mu=0.5).moments is None
    local = moments(slice(None))
    assert local.all_reduce() is local
    on_meta = local.to("meta")
    for part in (on_meta, on_meta + moments(slice(None))):  # a sum is where its first part is
        assert all(x.is_meta for x in (part.rollouts, part.demo_nll, part.totals))


RANK_ROWS = {  # by number of ranks; unequal counts, and with three ranks only one kind of row each
    2: [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]],
    3: [[0, 2, 3, 5, 8, 11], [1, 4, 6, 7], [9, 10]],
}


def merged(parts: list[list[int]]) -> tuple[Signals, list[float]]:
    """Signals and token counts on a rank after the all-reduce."""
    torch.distributed.init_process_group("gloo")
    total = moments(parts[torch.distributed.get_rank()]).all_reduce()
    return total.signals(0.2), total.totals[:2].tolist()


@pytest.mark.dist
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_agree_with_one_process(count: int) -> None:
    results, full = ranks.run(merged, RANK_ROWS[count], ranks=count), moments(slice(None))
    for signals, counts in results:
        assert_same(signals, full.signals(0.2))
        assert counts == full.totals[:2].tolist()
    assert len({tuple(signals) for signals, _ in results}) == 1  # bit for bit on every rank
