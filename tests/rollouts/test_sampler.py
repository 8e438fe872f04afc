"""The sampler with a scripted engine and reward: every row, statistic and call by hand."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gac.data import Example
from gac.data.micro_batches import demo_row
from gac.demo.task import make_tokenizer
from gac.rewards.base import Graded
from gac.rollouts import Rollout, equal_rewards, sampling, stats
from gac.rollouts.config import RolloutConfig
from gac.rollouts.equal_rewards import EqualRewardWarning
from gac.rollouts.generation import Completion
from gac.rollouts.samples import Sample, is_flat, prefix_of
from gac.rollouts.sampling import Sampler
from gac.rollouts.stats import Rollouts, SamplingStats
from gac.rows import Row
from gac.types import Credit, Sampling, Stage

WORDS = make_tokenizer()  # <eos> is 1, "2" is 5
A = Example("a", (4, 6), "13", None, (7, 8, 1), {}, source="x")
B = Example("b", (9,), "6", None, None, {})
C = Example("c", (10, 3), "70", None, (11, 1), {}, source="x")
D = Example("d", (12,), "9", None, (1,), {}, source="y")


class Script:
    """An engine, a reward and a credit with given results; records their calls."""

    def __init__(self, responses: Iterable[Any], scores: Iterable[Any], *credit: Any) -> None:
        self.responses, self.scores = iter(responses), iter(scores)
        self.values = Credit(*(torch.tensor(x, dtype=torch.float64) for x in credit))
        self.calls: list[Any] = []
        self.scored: list[tuple[str, str]] = []

    def run(self, plan: Sampling, examples: list[Example], more=None, **config: Any) -> Rollouts:
        settings = {
            "max_completion_length": 4,
            "stop": ("2",),
            "scale_rewards": "centered",
            **config,
        }
        rollouts = RolloutConfig(**settings)
        self.sampler = Sampler(
            rollouts,
            self,
            tokenizer=WORDS,
            reward=self,
            plan=plan,
            credit=self.credit,
            more=more,
            demos=False,
            seed=3,
        )
        return self.sampler("model", examples, 7)

    def load(self, model: Any) -> None:
        self.calls.append(model)

    def roll_out(self, examples: list[Example], number: int) -> list[Rollout]:
        self.calls.append(([e.prompt for e in examples], number))
        return [self.rollout(example) for example in examples for _ in range(number)]

    def rollout(self, example: Example) -> Rollout:
        tokens = next(self.responses)
        mask = [0] * len(tokens) if isinstance(tokens, list) else ()  # a list: only read
        return Rollout(example.prompt, tuple(tokens), mask, getattr(tokens, "logps", ()))

    def set_step(self, step: int) -> None:
        self.step = step

    def grade(self, texts: list[str], examples: list[Example]) -> Graded:
        self.scored += zip(texts, (e.id for e in examples), strict=True)
        return Graded([next(self.scores) for _ in texts], {"part": [2.0, math.nan]})

    def credit(self, rewards: Any, demos: Any, kind: str) -> Credit:
        assert rewards.dtype == torch.float64
        self.given = rewards.tolist(), demos if demos is None else demos.tolist(), kind
        return self.values


@pytest.fixture(autouse=True)
def third_rank(monkeypatch) -> None:
    """Rank 2 of 3, whose clock shows 1, 4, 9, 16 and so on."""
    clock = iter(range(1, 100))
    monkeypatch.setattr(sampling, "time", SimpleNamespace(perf_counter=lambda: next(clock) ** 2))
    for module in (sampling, equal_rewards):
        monkeypatch.setattr(module, "rank", lambda: 2)
    for module in (sampling, stats):
        monkeypatch.setattr(module, "world_size", lambda: 3)


def same(actual: Any, expected: Any) -> bool:
    """Equality under which nan equals itself."""
    return repr(actual) == repr(expected)


RESPONSES = (4, 1), (6, 7), (5,), (8, 5), (3, 3, 1), (9, 9, 9, 9)
SCORES = 1.0, 0.0, 0.5, 0.5, 0.25, None
ONES = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [9.0] * 3, [0.0] * 3, [8.0] * 3


def sampled() -> tuple[Script, Rollouts]:
    """Two rollouts for each of three prompts; the last one is dropped."""
    script = Script(RESPONSES, SCORES, *ONES)
    return script, script.run(Sampling(), [A, B, C], num_generations=2, log_sample_prompts=2)


def test_rows_of_rollouts_by_hand() -> None:
    """Demonstrations are separate, so their weights are not used."""
    _, result = sampled()
    assert result.rows == [
        Row((4, 6, 4, 1), 2, False, 1.0, 0, switch=2, unit=2, source="x"),
        Row((4, 6, 6, 7), 2, False, 2.0, 1, switch=2, unit=2, source="x"),
        Row((9, 5), 1, False, 3.0, 2, switch=1, unit=5),
        Row((9, 8, 5), 1, False, 4.0, 3, switch=1, unit=5),
        Row((10, 3, 3, 3, 1), 2, False, 5.0, 4, switch=2, unit=8, source="x"),
    ]
    assert result.old_logps == result.teacher_logps == result.collected == []


def test_rewards_of_rollouts_by_hand() -> None:
    script, result = sampled()
    assert result.rewards == [1.0, 0.0, 0.5, 0.5, 0.25]
    assert result.means == {"reward_mean/x": (1.25, 3), "reward/part": (2.0, 1)}
    assert script.scored == list(zip(("1", "34", "2", "52", "00", "6666"), "aabbcc", strict=True))
    assert same(script.given, ([[1.0, 0.0], [0.5, 0.5], [0.25, math.nan]], None, "centered"))


def test_statistics_of_rollouts_by_hand() -> None:
    script, result = sampled()
    # the engine took 4 - 1 seconds, the reward 16 - 9
    assert script.sampler.stats == SamplingStats(
        6, 14, 3, 7, groups=2, flat_groups=1, unsolved=1, truncated=2
    )
    assert script.step == result.step == 7
    assert script.calls == ["model", ([A.prompt, B.prompt, C.prompt], 2)]


def test_without_rows_to_score_there_are_no_terms() -> None:
    """On a rank on which no prompt is replaced."""
    script, result = sampled()
    before = dict(result.means)
    script.sampler._sample([], Stage(2), [], None)
    assert result.means == before


def test_logged_samples_by_hand() -> None:
    script, _ = sampled()
    first, second = script.sampler.samples
    assert (first["id"], first["prompt"], first["demonstration"]) == ("a", "13", "45")
    assert (second["id"], second["demonstration"]) == ("b", None)
    assert first["completions"] == [
        {"text": "1", "reward": 1.0, "truncated": False},
        {"text": "34", "reward": 0.0, "truncated": True},
    ]


def test_truncated_rollouts_can_be_skipped_or_punished() -> None:
    script = Script(RESPONSES, SCORES, *ONES)
    settings = {"num_generations": 2, "overlong_tokens": 2, "overlong_penalty": 0.5}
    result = script.run(Sampling(), [A, B, C], mask_truncated_completions=True, **settings)
    assert [row.advantage for row in result.rows] == [1, 3, 4, 5]
    assert result.rewards == [1.0, 0.0, 0.5, 0.5, 0.0]  # 3 of 4 tokens cost 0.25


def test_tokens_that_are_only_read_are_not_counted() -> None:
    script = Script([(4, 1), [6, 7]], [1.0, 0.0], [[1.0, 2.0]], [9.0], [0.0], [8.0])
    (row,) = script.run(Sampling(), [A], num_generations=2).rows
    assert row.advantage == 1
    assert script.sampler.stats.tokens == 2


def test_demonstrations_of_the_prompts_by_hand() -> None:
    """They share the group of their prompt; B has none, and the rollout of D has weight 0."""
    responses = Completion.of((4, 1), (-1.0, -2.0)), (6, 1), (7, 1)
    credit = [[1.0], [2.0], [3.0]], [7.0, 8.0, 9.0], [2.0, 0.0, 0.0], [3.0, 5.0, 4.0]
    script = Script(responses, (1.0, 0.5, 0.0, 0.7, None), *credit)
    plan = Sampling("prompt", demo_in_group=True, teacher=True, advantages="batch", demo_tokens=1)
    result = script.run(plan, [A, B, D], num_generations=1)
    row = Row((4, 6, 4, 1), 2, False, 1.0, 0, 2.0, 2, 2, (-1.0, -2.0), (4, 6, 7, 8, 1), "x")
    assert result.rows == [
        row,
        demo_row(A, 1)._replace(advantage=7.0, weight=3.0, unit=2, sequence=1),
        Row((9, 6, 1), 1, False, 2.0, 2, switch=1, unit=5),
        demo_row(D, 1)._replace(advantage=9.0, weight=4.0, unit=8, sequence=3),
    ]
    assert same(script.given, ([[1.0], [0.5], [0.0]], [0.7, math.nan, math.nan], "batch"))
    assert script.scored[3:] == [("45", "a"), ("", "d")]


def test_demonstrations_are_collected_by_their_weight() -> None:
    credit = [[1.0], [2.0], [3.0]], [0.0] * 3, [1.0] * 3, [1.0, 1.0, 0.0]
    script = Script([(4, 1)] * 3, [0.0] * 3, *credit)
    result = script.run(Sampling("prompt", collect=2), [A, B, D], num_generations=1)
    assert result.collected == [A, None, None]
    assert [row.advantage for row in result.rows] == [1, 2, 3]


def test_stages_by_hand() -> None:
    """The second stage continues half of the demonstration of A, and all of D, which is one
    token; the mean reward of C is too high for a prefix. The second rollout's prefix is trained.
    """
    stages = Stage(1), Stage(2, prefix=0.5, below=0.75, trained=1)
    first = (4, 1), (6, 1), (3, 1)
    second = Completion.of((9, 1), (-1.0, -2.0)), Completion.of((3, 1), (-3.0, -4.0))
    later = (7, 7), Completion.of((8, 8), (-5.0, -6.0)), (10, 1), (11, 4)
    table = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    scores = 0.5, 0.0, 0.75, 0.2, 0.3, 0.9, 0.9, 0.75, 0.75
    script = Script((*first, *second, *later), scores, table, [0.0] * 3, [1.0] * 3, [1.0] * 3)
    result = script.run(Sampling("prompt", stages), [A, D, C], num_generations=3, overlong_tokens=2)
    assert script.calls[1:] == [
        ([A.prompt, D.prompt, C.prompt], 1),
        ([(4, 6, 7, 8), (12,), (10, 3)], 2),
    ]
    assert [text for text, _ in script.scored] == ["1", "3", "0", "456", "450", "", "", "7", "81"]
    nans = math.nan, math.nan
    expected = [
        Row((4, 6, 4, 1), 2, False, 1.0, 0, 1.0, 2, 2, source="x"),
        Row((4, 6, 7, 8, 9, 1), 4, False, 2.0, 1, 1.0, 4, 2, (-1.0, -2.0), source="x"),
        Row((4, 6, 7, 8, 3, 1), 2, False, 3.0, 2, 1.0, 4, 2, (*nans, -3.0, -4.0), source="x"),
        Row((12, 6, 1), 1, False, 4.0, 3, 1.0, 1, 5, source="y"),
        Row((12, 1), 1, True, 6.0, 4, 1.0, 2, 5, source="y"),
        Row((10, 3, 3, 1), 2, False, 7.0, 5, 1.0, 2, 8, source="x"),
        Row((10, 3, 10, 1), 2, False, 8.0, 6, 1.0, 2, 8, source="x"),
        Row((10, 3, 11, 4), 2, False, 9.0, 7, 1.0, 2, 8, source="x"),
    ]
    assert same(result.rows, expected)
    assert result.rewards == [0.5, 0.2, 0.3, 0.0, 0.75, 0.75, 0.75]
    assert script.sampler.stats[:2] == (9, 18)
    assert script.sampler.stats[4:8] == (2, 1, 0, 1)
    assert script.sampler.samples[1]["completions"][1] == {
        "text": "",
        "reward": 0.9,
        "truncated": False,
    }


def test_a_complete_demonstration_needs_no_continuation() -> None:
    """Its last token is sampled instead, in step with the other ranks, and discarded."""
    stages = Stage(1, prefix=1.0), Stage(1)
    script = Script([(9, 1), (4, 1)], [0.0, 1.0], [[1.0, 2.0]], [0.0], [1.0], [1.0])
    result = script.run(Sampling("prompt", stages), [A], num_generations=2)
    assert result.rewards == [1.0]
    assert [row.advantage for row in result.rows] == [2.0]
    assert script.calls[1:] == [([(4, 6, 7, 8)], 1), ([(4, 6)], 1)]
    assert [text for text, _ in script.scored] == ["45", "1"]


@pytest.mark.parametrize(("responses", "scores"), [(1, 2), (2, 1)])
def test_every_prompt_needs_all_responses_and_scores(monkeypatch, responses, scores) -> None:
    script = Script([], [], *ONES)
    sampled = [Rollout(A.prompt, (4, 1), ())] * responses
    monkeypatch.setattr(Script, "roll_out", lambda self, *_: sampled)
    graded = Graded([1.0] * scores, {})
    monkeypatch.setattr(Script, "grade", lambda self, *_: graded)
    with pytest.raises(ValueError, match="zip"):
        script.run(Sampling(), [A], num_generations=2)


def test_frac_reward_zero_std_are_replaced_at_most_twice() -> None:
    """A and C are flat; D, in the place of A, is not, and C's second replacement is flat again."""
    asked = []

    def more(count: int) -> list[Example]:
        asked.append(count)
        return [D, replace(A, id="e")] if count == 2 else [replace(B, id="f")]

    pairs = [0.5, 0.5], [0.0, 1.0], [0.0, 0.0], [0.25, 0.75], [1.0, 1.0], [0.6, 0.6]
    script = Script([(4, 1)] * 12, [s for pair in pairs for s in pair], *ONES)
    result = script.run(
        Sampling(),
        [A, B, C],
        more,
        num_generations=2,
        dynamic_sampling_retries=2,
        log_sample_prompts=9,
    )
    # the rewards of all that were sampled
    assert asked == [2, 1]
    assert result.rewards == [s for pair in pairs for s in pair]
    assert [sample["id"] for sample in script.sampler.samples] == ["d", "b", "f"]
    assert script.sampler.stats[:2] == (12, 24)
    assert script.sampler.stats[4:8] == (3, 2, 3, 0)
    assert script.calls[2:] == [([D.prompt, A.prompt], 2), ([B.prompt], 2)]


def test_ranks_resample_together(monkeypatch) -> None:
    asked = []

    def more(count: int) -> list[Example]:
        asked.append(count)
        return []

    monkeypatch.setattr(
        sampling.collectives, "largest", lambda values: [1 - len(asked)] * len(values)
    )
    script = Script([(4, 1)] * 2, [0.0, 1.0], *ONES)
    script.run(Sampling(), [A], more, num_generations=2, dynamic_sampling_retries=3)
    assert asked == [0]
    assert script.calls[2:] == [([], 2)]
    assert script.sampler.stats.resampled == 0


def test_all_flat_groups_are_replaced() -> None:
    script = Script([(4, 1)] * 2, [0.5] * 2, *ONES)
    with pytest.raises(ValueError, match="zip"):
        script.run(Sampling(), [A], lambda count: [], num_generations=2, dynamic_sampling_retries=1)


def test_the_rows_of_a_pair_share_a_unit() -> None:
    assert [Sampling(groups=g, pairs=p).unit(5) for g, p in ((0, 0), (0, 1), (1, 0))] == [1, 2, 5]
    script = Script(RESPONSES, SCORES, *ONES)
    rows = script.run(Sampling(pairs=True), [A, B, C], num_generations=2).rows
    assert [(row.ids, row.advantage, row.unit, row.sequence) for row in rows] == [
        ((4, 6, 4, 1), 1.0, 2, 0),
        ((4, 6, 6, 7), -1.0, 2, 1),
    ]
    script = Script(RESPONSES[2:4], [1.0, 1.0], [[1.0, 2.0]], [9.0], [1.0], [1.0])
    assert script.run(Sampling(pairs=True), [B], num_generations=2).rows == []
    assert script.sampler.equal_rewards.steps == script.sampler.stats.solved == 1


def test_a_prompt_with_a_dropped_rollout_has_no_group() -> None:
    script = Script(RESPONSES, SCORES, *ONES)
    rows = script.run(Sampling(groups=True), [A, B, C], num_generations=2).rows
    assert [(row.advantage, row.unit) for row in rows] == [(1, 2), (2, 2), (3, 5), (4, 5)]


def test_random_prefixes_depend_on_the_seed_the_step_and_the_prompt() -> None:
    drawn = []

    def length(step: int, tokens: int, rng: random.Random) -> int:
        drawn.append((step, tokens, rng.random()))
        return 2

    stage = Stage(1, length=length)
    plans = [Sampling(stages=stages) for stages in ((stage,), (Stage(1),), (Stage(1, prefix=0.1),))]
    assert [plan.has_prefix for plan in plans] == [True, False, True]
    assert prefix_of(A, [], stage, 5, 4) == (7, 8)
    assert prefix_of(B, [], stage, 5, 4) == prefix_of(A, [], Stage(1), 5, 4) == ()
    assert drawn == [(5, 3, random.Random("4:5:a").random())]


def test_only_responses_of_the_policy_make_a_group() -> None:
    complete = Sample((), (7,), (), 0.0, True, False)
    own = Sample((), (), (4,), 1.0, False, False)
    assert not is_flat([complete, own])
    assert is_flat([complete, own, own])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("demos", "cause"), [(True, "only the demonstrations teach"), (False, "nothing teaches")]
)
def test_one_rank_says_once_why_rollouts_teach_nothing(
    monkeypatch, caplog, rank, demos, cause
) -> None:
    """After ten samplings; with demonstrations, a reward of 0 need not be an error."""
    monkeypatch.setattr(equal_rewards, "rank", lambda: rank)
    watch, silent = EqualRewardWarning(demos, not demos), SamplingStats(groups=1, flat_groups=1)
    nine = [silent] * 9
    stats = [*nine, SamplingStats(groups=2, flat_groups=1), *nine, SamplingStats(), *nine * 3]
    for given, rewards in enumerate(([0.0, 0.0], [1.0, 1.0], [0.0, 1.0])):
        for count, sampled in enumerate(stats):
            watch.update(sampled, rewards)
            assert len(caplog.records) == (given + (count >= 29)) * (rank == 0)
    if rank == 0:
        first, solved, mixed = (record.getMessage() for record in caplog.records)
        assert first.startswith(
            "for 10 steps, every rollout since the start or resume has had the reward 0"
        )
        assert cause in first
        assert "solved;" not in first
        assert "highest reward, 1" in solved
        assert "check the reward" not in solved
        assert "another difficulty" in mixed
        assert ("_retries" in mixed) != demos
    monkeypatch.setattr(sampling.collectives, "_table", lambda own: [own, [5.0, 0.0]])
    watch.update(silent, [0.0])  # another rank's rollouts teach
    assert (watch.highest, watch.problem) == (5.0, "")
