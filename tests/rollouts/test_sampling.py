"""Statistics, warnings and records of the sampling of rollouts."""

import math
import statistics

import pytest
import torch

from gac.demo.task import make_tokenizer
from gac.methods.advantages import group_advantages, group_credit
from gac.rollouts import sampling
from gac.rollouts.config import RolloutConfig
from gac.rollouts.sampling import Sampler
from gac.rollouts.stats import SamplingStats
from gac.rows import Row, collate, engine_logps, scatter_logps
from gac.types import Sampling


@pytest.mark.parametrize("ranks", [1, 2])
def test_columns_of_the_sampling(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are totals over the ranks; times are means, because the ranks work in parallel."""
    assert set(SamplingStats()) == {0}
    stats = SamplingStats(
        6, 24, 2.0, 0.5, groups=4, flat_groups=1, solved=2, unsolved=1, resampled=3, truncated=2
    )
    monkeypatch.setattr("gac.rollouts.stats.world_size", lambda: ranks)
    columns = stats.columns()
    assert columns == {
        "sampled_completions": 6,
        "sampled_tokens": 24,
        "sampling_seconds": 2 / ranks,
        "completions_per_second": 3 * ranks,
        "reward_seconds": 0.5 / ranks,
        "frac_reward_zero_std": 0.25,
        "frac_solved": 0.5,
        "frac_unsolved": 0.25,
        "resampled_prompts": 3,
        "completions/clipped_ratio": 1 / 3,
        "completions/mean_length": 4,
    }
    counts = "sampled_completions", "sampled_tokens", "resampled_prompts"
    assert all(type(columns[name]) is int for name in counts)
    empty = SamplingStats().columns()
    assert {name for name, value in empty.items() if value is None} == {
        "completions_per_second",
        "frac_reward_zero_std",
        "frac_solved",
        "frac_unsolved",
        "completions/clipped_ratio",
        "completions/mean_length",
    }


def test_advantages_and_credit_by_hand() -> None:
    """With dropped rollouts, groups of equal rewards, and a demonstration in the group."""
    rewards = [[1.0, 0.0], [3.0, 1.0, 5.0], [0.7] * 3, [2.0], []]
    rows = [row + [math.nan] * (4 - len(row)) for row in rewards]
    table = torch.tensor(rows, dtype=torch.float64)
    spread = statistics.stdev(x for row in rewards for x in row)
    scales = {"centered": (1, 1), "std": (math.sqrt(0.5) + 1e-4, 2 + 1e-4)}
    scales["batch"] = (spread + 1e-4, spread + 1e-4)
    for kind, (pair, triple) in scales.items():
        first, second, *others = group_advantages(table, kind).tolist()
        assert first == pytest.approx([0.5 / pair, -0.5 / pair, 0, 0], rel=1e-12)
        assert second == pytest.approx([0, -2 / triple, 2 / triple, 0], rel=1e-12)
        assert others == [[0.0] * 4] * 3
    table = table[[0, 2, 4]]
    pair = group_advantages(table[:1], "batch")
    assert pair[0, 0].item() == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4), rel=1e-12)
    demos = torch.tensor([2.0, math.nan, 0.5], dtype=torch.float64)
    credit = group_credit(table, demos, "centered")
    assert credit.rollouts.tolist() == [[0, -1, 0, 0], pytest.approx([0.0] * 4), [0] * 4]
    assert credit.demos.tolist() == [1, 0, 0]
    plain = group_credit(table, None, "std")
    assert torch.equal(plain.rollouts, group_advantages(table, "std"))
    ones = [plain.demos, plain.rollout_weight, plain.demo_weight, *credit[2:]]
    assert all(x.tolist() == [1] * 3 for x in ones)


def test_one_scored_response_has_no_advantage() -> None:
    rewards = torch.tensor([[0.7, math.nan]], dtype=torch.float64)
    for kind in ("std", "centered", "batch"):
        assert group_advantages(rewards, kind).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("rank", "top_p", "warns"), [(0, 0.9, True), (1, 0.9, False), (0, 1, False)]
)
def test_one_rank_warns_about_truncated_sampling(monkeypatch, caplog, rank, top_p, warns) -> None:
    monkeypatch.setattr(sampling, "rank", lambda: rank)
    Sampler(
        RolloutConfig(top_p=top_p),
        None,
        tokenizer=make_tokenizer(),
        reward=None,
        plan=Sampling(),
        credit=group_credit,
        more=None,
        demos=False,
        seed=0,
    )
    assert ("rollouts.top_p=" in caplog.text) == warns


def test_log_probs_are_placed_at_the_positions_that_predict_their_tokens() -> None:
    """A first token is never predicted; a server's log-probs are nan where it sampled nothing."""
    rows = [
        Row((5, 6, 7, 8), 2, False, engine_logps=(-1.0, -2.0)),
        Row((5, 6, 9), 0, False, engine_logps=(-3.0, -4.0, -5.0)),
        Row((7, 8), 1, False),
    ]
    values = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0, -5.0]), torch.tensor([-6.0])]
    padded = [[0, -1, -2, 0], [-4, -5, 0, 0], [-6, 0, 0, 0]]
    for packed, expected in (False, padded), (True, [[0, -1, -2, 0, -4, -5, 0, -6, 0]]):
        batch = collate(rows, 0, packed=packed)
        assert scatter_logps(values, rows, batch).tolist() == expected
        nan_to_zero = engine_logps(rows, batch).nan_to_num(0).tolist()
        assert nan_to_zero == [[0 if x == -6 else x for x in row] for row in expected]
    assert engine_logps([], collate([], 0)).isnan().tolist() == [[True]]
    with pytest.raises(ValueError, match="zip"):
        scatter_logps(values[:2], rows, batch)
