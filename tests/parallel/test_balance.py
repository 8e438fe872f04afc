"""Balancing rows across ranks by token count, which must not affect the results."""

import random

import pytest

from gac.data.micro_batches import MicroBatches, assign_rows
from gac.rollouts import engines
from gac.rollouts.generation import Completion
from gac.rows import Row
from gac.training.trainer import Trainer
from tests import ranks
from tests.parallel.test_distributed import assert_same, config, record_gradients, weights
from tests.tiny import TIMING_KEYS, take_steps


def random_rows(number: int, seed: int = 0) -> list[Row]:
    """Rows with long-tailed lengths: some demonstrations, some with zero advantage, two weights."""
    rng = random.Random(seed)
    return [
        Row(
            (5,) * min(int(8 * rng.paretovariate(1.1)), 400),
            1,
            i % 4 == 3,
            rng.choice([0.0, 1.0]),
            i,
            weight=rng.choice([1.0, 0.5]),
        )
        for i in range(number)
    ]


def tokens(rows: list[Row]) -> int:
    return sum(len(row.ids) for row in rows)


def pairs(rows: list[Row]) -> set[tuple[int, int]]:
    """Sequence numbers of consecutive pairs of rows of one kind."""
    numbers = set()
    for kind in {r.kind for r in rows}:
        same_kind = [r.sequence for r in rows if r.kind == kind]
        numbers |= set(zip(same_kind[::2], same_kind[1::2], strict=False))
    return numbers


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_row_is_assigned_once_in_order(count, unit):
    rows = random_rows(96)
    per_rank = assign_rows(rows, count, unit)
    assert sorted(r.sequence for own in per_rank for r in own) == list(range(96))
    for own in per_rank:
        assert [r.sequence for r in own] == sorted(r.sequence for r in own)
        assert unit == 1 or pairs(own) <= pairs(rows)


def test_long_tails_are_balanced():
    """Largest number of tokens on 8 ranks relative to the mean, averaged over 20 batches: balanced
    and, for comparison, round-robin.
    """
    round_robin = balanced = 0.0
    for seed in range(20):
        rows = random_rows(256, seed)
        mean, longest = tokens(rows) / 8, max(len(r.ids) for r in rows)
        per_rank = assign_rows(rows, 8)
        round_robin += max(tokens(rows[i::8]) for i in range(8)) / mean / 20
        balanced += max(map(tokens, per_rank)) / mean / 20
        for kind in {r.kind for r in rows}:
            for live in (True, False):
                loads = [
                    tokens([r for r in own if r.kind == kind and live == bool(r.advantage)])
                    for own in per_rank
                ]
                assert kind[0] or max(loads) - min(loads) <= longest
    assert round_robin > 1.35
    assert balanced < 1.15


def test_one_very_long_row():
    rows = [Row((5,) * 100, 1, False, 1.0), *[Row((5,) * 3, 1, False, 1.0)] * 6]
    assert [len(own) for own in assign_rows(rows, 3)] == [1, 3, 3]
    assert assign_rows([], 2) == [[], []]


def test_a_given_number_of_micro_batches_of_similar_size():
    """A rank that needs fewer micro-batches than requested makes them smaller."""
    rows = [Row((5,) * 10, 1, False, 1.0, i) for i in range(6)]
    micro = MicroBatches(tokens=30, packed=True)
    assert list(map(tokens, micro.split(rows))) == [30, 30]
    assert list(map(tokens, micro.split(rows, 3))) == [20, 20, 20]
    assert list(map(len, micro.split(rows, 9))) == [1] * 6


def test_each_group_of_rows_is_balanced_by_itself():
    """The rank with the long rollout also gets one of the two demonstrations."""
    rows = [Row((5,) * 10, 1, False, 1.0), *[Row((5,) * 4, 1, True, 1.0)] * 2]
    assert [sorted(map(len, (r.ids for r in own))) for own in assign_rows(rows, 2)] == [
        [4, 10],
        [4],
    ]


def long_tailed_responses(model, tokenizer, prompts, *, num_generations, **_):
    """Fake generation that depends only on the prompt: 30 tokens, or 1 to 3 for half of them."""
    responses = []
    for prompt in prompts:
        for i in range(num_generations):
            rng = random.Random(f"{prompt}/{i}")
            length = rng.choice([1, 2, 3] if sum(prompt) % 2 else [30])
            responses.append(Completion(rng.randrange(3, 18) for _ in range(length)))
    return responses


def four_steps(run_config):
    """Like `test_distributed.train_steps`, but also returns the rank's token counts before and
    after balancing, and with several ranks repeats the last two steps from a checkpoint.
    """
    engines.generate = long_tailed_responses  # runs in its own process
    trainer = Trainer(run_config)
    before, after, rows = [], [], []

    def sample(*arguments, original=trainer.sampler):
        rollouts = original(*arguments)
        before.append(tokens(rollouts.rows))
        return rollouts

    grads = record_gradients(trainer)
    trainer.sampler = sample
    for _ in range(4):
        if trainer.step == 2 and trainer.accelerator.num_processes > 1:
            trainer.save()
        rows.append(trainer._train_step())
        after.append(tokens(trainer.rollouts.rows))
        trainer.step += 1
    trained = weights(trainer.model)
    if trainer.accelerator.num_processes > 1:  # other tests resume a single process
        resumed = Trainer(run_config)
        assert list(map(without_timing, take_steps(resumed, 4 - resumed.step))) == list(
            map(without_timing, rows[2:])
        )
    return rows, grads[0], trained, [*zip(before, after[::2], strict=True)]  # sampled every 2 steps


def without_timing(row):
    return {k: v for k, v in row.items() if k not in TIMING_KEYS}


@pytest.mark.dist
@pytest.mark.parametrize(("method", "mode"), [("gac", "ddp"), ("dpo", "fsdp")])
def test_results_do_not_depend_on_row_placement(task, tmp_path, method, mode):
    """Compares padding on one process with packing and balancing on two. Covers
    preference pairs and the old log-probs of reused rollouts. A run resumed halfway is bitwise
    identical.
    """
    changes = {
        "method": method,
        "steps": 4,
        "demo_batch_size": 6,
        "rollouts": {
            "num_prompts": 4,
            "num_generations": 4,
            "max_completion_length": 30,
            "num_iterations": 2,
        },
    }
    single = ranks.run(four_steps, config(task, tmp_path / "one", **changes), ranks=1)[0]
    balanced = config(
        task, tmp_path / "two", **changes, max_tokens_per_micro_batch=120, parallel={"mode": mode}
    )
    many = ranks.run(four_steps, balanced, ranks=2)
    for rank in many:
        assert_same(single, rank)
    loads = [x for rank in many for x in rank[3]]
    assert sum(before for before, _ in loads) == sum(after for _, after in loads)
    before, after = (max(column) for column in zip(*loads, strict=True))
    if method == "dpo":  # only three long pairs, so balancing cannot help
        assert after == before
    else:
        assert after < 0.9 * before
