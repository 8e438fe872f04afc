"""Balancing rows across ranks by token count: the shares, and that results do not depend on them."""

from __future__ import annotations

import random

import pytest

from gac.data.balance import shares
from gac.data.micro import MicroBatches
from gac.data.rows import Row
from gac.rollouts import engines
from gac.training.trainer import Trainer

from . import ranks
from .test_distributed import assert_same, config, whole


def some_rows(number: int, seed: int = 0) -> list[Row]:
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


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_shares_hold_every_row_once_in_order(count, together):
    rows = some_rows(96)
    found = shares(rows, count, together)
    assert sorted(r.sequence for share in found for r in share) == list(range(96))
    for share in found:
        assert [r.sequence for r in share] == sorted(r.sequence for r in share)
    kinds = {r.kind for r in rows}
    pairs = {
        (a.sequence, b.sequence)
        for kind in kinds
        for alike in [[r for r in rows if r.kind == kind]]
        for a, b in zip(alike[::2], alike[1::2], strict=False)
    }
    if together == 2:
        for share in found:
            for kind in kinds:
                alike = [r for r in share if r.kind == kind]
                own = zip(alike[::2], alike[1::2], strict=False)
                assert {(a.sequence, b.sequence) for a, b in own} <= pairs


def test_long_tails_are_spread():
    """Largest token count over 8 ranks relative to the mean, balanced vs. round-robin, averaged
    over 20 batches.
    """
    dealt = spread = 0.0
    for seed in range(20):
        rows = some_rows(256, seed)
        mean, longest = tokens(rows) / 8, max(len(r.ids) for r in rows)
        found = shares(rows, 8)
        dealt += max(tokens(rows[i::8]) for i in range(8)) / mean / 20
        spread += max(map(tokens, found)) / mean / 20
        for kind in {r.kind for r in rows}:
            for live in (True, False):
                loads = [
                    tokens([r for r in share if r.kind == kind and live == bool(r.advantage)])
                    for share in found
                ]
                assert kind[0] or max(loads) - min(loads) <= longest
    assert dealt > 1.35 and spread < 1.15


def test_one_row_above_all_others():
    rows = [Row((5,) * 100, 1, False, 1.0), *[Row((5,) * 3, 1, False, 1.0)] * 6]
    assert [len(share) for share in shares(rows, 3)] == [1, 3, 3]
    assert shares([], 2) == [[], []]


def test_the_same_number_of_micro_batches_of_like_size():
    """A rank that needs fewer micro-batches than requested makes them smaller."""
    rows = [Row((5,) * 10, 1, False, 1.0, i) for i in range(6)]
    micro = MicroBatches(tokens=30, packed=True)
    assert list(map(tokens, micro.split(rows))) == [30, 30]
    assert list(map(tokens, micro.split(rows, 3))) == [20, 20, 20]
    assert list(map(len, micro.split(rows, 9))) == [1] * 6


def long_tailed(model, tokenizer, prompts, *, samples, **_):
    """Fake generation that depends only on the prompt: 30 tokens for half of the prompts, 1 to 3
    for the others.
    """
    found = []
    for prompt in prompts:
        for i in range(samples):
            rng = random.Random(f"{prompt}/{i}")
            length = rng.choice([1, 2, 3] if sum(prompt) % 2 else [30])
            found.append(tuple(rng.randrange(3, 18) for _ in range(length)))
    return found


def four_steps(made):
    """Like `test_distributed.five_steps`, but also returns the rank's token counts before and after
    the exchange, and repeats the last two steps from a checkpoint.
    """
    engines.generate = long_tailed  # runs in its own process
    trainer = Trainer(made)
    grads, loads, rows = [], [], []

    def record(*_):
        named = trainer.model.named_parameters()
        grads.append({n.removeprefix("module."): whole(p.grad) for n, p in named})

    def exchange(rollouts, plain=trainer.feed.balanced):
        found = plain(rollouts)
        loads.append((tokens(rollouts), tokens(found)))
        return found

    trainer.optimizer.register_step_pre_hook(record)
    trainer.feed.balanced = exchange
    for _ in range(4):
        if trainer.step == 2:
            trainer._save()
        rows.append(trainer._train_step())
        trainer.step += 1
    weights = {n.removeprefix("module."): whole(p) for n, p in trainer.model.named_parameters()}
    again = Trainer(made)
    repeated = []
    while again.step < 4:
        repeated.append(again._train_step())
        again.step += 1
    clocks = {"sampling_seconds", "responses_per_second"}
    for a, b in zip(rows[2:], repeated, strict=True):
        assert {k: v for k, v in a.items() if k not in clocks} == {
            k: v for k, v in b.items() if k not in clocks
        }
    return rows, grads[0], weights, loads


@pytest.mark.dist
@pytest.mark.parametrize(("method", "mode"), [("gac-gated-sketch", "ddp"), ("dpo", "fsdp")])
def test_no_result_depends_on_who_has_a_row(task, tmp_path, method, mode):
    """Padded on one process vs. packed and balanced on two; covers unit sketches, preference pairs
    and old log-probs of reused rollouts. A run resumed halfway is bitwise identical.
    """
    made = {
        "method": method,
        "steps": 4,
        "demo_batch": 6,
        "rollouts": {"prompts": 4, "completions": 4, "max_new_tokens": 30, "reuse": 2},
    }
    one = ranks.run(four_steps, config(task, tmp_path / "one", **made), ranks=1)[0]
    many = ranks.run(
        four_steps,
        config(task, tmp_path / "two", **made, micro_tokens=120, parallel={"mode": mode}),
        ranks=2,
    )
    for rank in many:
        assert_same(one, rank)
    loads = [x for rank in many for x in rank[3]]
    assert sum(dealt for dealt, _ in loads) == sum(mine for _, mine in loads)
    most = [max(side) for side in zip(*loads, strict=True)]
    assert most[1] < 0.9 * most[0] or (
        method == "dpo" and most[1] == most[0]
    )  # only three long pairs, so no better split exists
