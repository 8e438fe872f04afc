"""Rows, their batches, counts and micro-batches, against values computed by hand."""

from dataclasses import replace

import pytest
import torch

from gac.data import Example
from gac.data.micro_batches import MicroBatches, assign_rows, demo_row, rebalance
from gac.rows import Counts, Row, collate, count, loss_divisors
from gac.types import TermPair
from gac_kernels import LossSpec

# two responses that begin with a part of a demonstration
MIXED = (
    Row((1, 2, 3, 4, 5), 1, False, 1.5, switch=3, unit=7),
    Row((6, 7, 8), 0, False, -2.0, switch=2, unit=9),
)


def test_packed_rows_follow_each_other():
    batch = collate(MIXED, 99, packed=True)
    inputs = batch.model_inputs
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.targets.tolist() == [[2, 3, 4, 5, -100, 7, 8, -100]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert inputs["attention_mask"] is None
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert inputs[name].tolist() == [0, 5, 8]
        assert inputs[name].dtype == torch.int32
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (5, 5)


def test_padded_rows_have_a_mask():
    batch = collate(MIXED, 99, packed=False)
    inputs = batch.model_inputs
    assert inputs.keys() == {"input_ids", "attention_mask"}
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 99, 99]]
    assert batch.targets.tolist() == [[2, 3, 4, 5, -100], [7, 8, -100, -100, -100]]
    assert inputs["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert inputs["attention_mask"].dtype == torch.int64


@pytest.mark.parametrize("packed", [True, False])
def test_a_mixed_row_is_two_sequences(packed):
    batch = collate(MIXED, 99, packed=packed)
    assert batch.targets.dtype == torch.int64
    assert batch.starts == (0, 5)
    # the position before a token predicts it
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 6, 8 if packed else 10]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.advantages.tolist() == [1.5, 1.5, -2.0, -2.0]
    assert batch.is_demo.tolist() == [True, False] * 2
    assert batch.units.tolist() == [7, 7, 9, 9]


def test_only_tokens_that_a_loss_covers_are_counted():
    rows = [
        *MIXED,  # 2 and 1 tokens of a demonstration, 2 and 1 of the policy
        Row((1, 2, 3), 1, False, switch=3),  # a demonstration to its end
        Row((1, 2, 3, 4), 2, False, switch=2),  # a prompt followed by the policy's tokens
        Row((1, 2, 3, 4, 5, 6), 1, True, switch=3),  # a demonstration
        Row((1, 2), 2, True),  # no loss
    ]
    assert [row.mixed for row in rows] == [True, True, True, False, False, False]
    assert [row.demo_tokens for row in rows] == [2, 2, 2, 0, 5, 0]
    assert count(rows) == Counts(3, 5, 4, 11, rows=5, tokens=23)
    assert rows[0]._replace(weight=0.5).kind == (False, True, 0.5, False)
    plain = Row((1, 2), 0, False)
    assert [row.kind for row in (rows[4], plain)] == [
        (True, False, 1.0, False),
        (False, False, 1.0, False),
    ]


@pytest.mark.parametrize(
    ("rollout", "demo", "divisors", "pooled"),
    [
        ("sequence", "token", (20, 3), (50, 5)),
        ("token", "sequence", (2, 30), (5, 50)),
        ("constant", "sequence", (2, 3), (5, 5)),
    ],
)
def test_each_term_is_divided_by_its_rows_or_tokens(rollout, demo, divisors, pooled):
    counts = Counts(3, 30, 2, 20, rows=5, tokens=99)
    spec = LossSpec(rollout_reduction=rollout, demo_reduction=demo, max_tokens=8)
    assert loss_divisors(counts, spec) == TermPair(*divisors)
    assert loss_divisors(counts, spec, pooled=True) == TermPair(*pooled)


@pytest.mark.parametrize(("tokens", "start"), [(None, 2), (2, 3), (9, 2)])
def test_the_end_of_a_demonstration_may_have_the_loss(tokens, start):
    example = Example("0", (1, 2), "", None, (3, 4, 5), {}, "web")
    expected = Row((1, 2, 3, 4, 5), start, True, 1.0, source="web")
    assert demo_row(example, tokens) == expected
    assert demo_row(replace(example, demo=None), tokens) == expected._replace(ids=(1, 2), start=2)


@pytest.mark.parametrize(
    ("options", "lengths", "parts"),
    [
        ({}, [3, 1, 2], [[0, 1, 2]]),
        ({}, [], []),
        ({"rows": 2}, [3, 1, 2], [[0, 1], [2]]),
        ({"rows": 1, "unit": 2}, [1] * 4, [[0, 1], [2, 3]]),
        ({"rows": 5, "unit": 2}, [1] * 6, [[0, 1, 2, 3], [4, 5]]),
        # rows of similar length, padded to the longest: 3 x 4 tokens
        ({"tokens": 12}, [3, 4, 2, 4], [[1, 3, 0], [2]]),
        ({"tokens": 12, "unit": 2}, [1, 2, 3, 1, 1, 1], [[2, 3, 0, 1], [4, 5]]),
        ({"tokens": 9, "packed": True}, [2, 3], [[0, 1]]),
        ({"tokens": 9, "packed": True}, [4, 5, 1, 4, 4], [[1, 4], [0, 2, 3]]),
        # 18 tokens in three rows do not fit into two parts of 11
        ({"tokens": 11, "packed": True}, [6, 6, 6], [[0], [1], [2]]),
        ({"tokens": 10, "packed": True, "unit": 2}, [1, 2, 3, 4], [[0, 1, 2, 3]]),
        # a unit with more tokens than the budget is alone, and the others keep their limit
        ({"tokens": 4}, [2, 5, 2, 9], [[1], [3], [0, 2]]),
        ({"tokens": 4, "unit": 2}, [1, 1, 9, 1, 1, 1], [[2, 3], [0, 1, 4, 5]]),
        ({"tokens": 4, "packed": True}, [2, 5, 2, 9], [[1], [3], [0, 2]]),
    ],
)
def test_micro_batches_by_hand(options, lengths, parts):
    rows = [Row((5,) * n, 1, False, 1.0, i) for i, n in enumerate(lengths)]
    assert [[row.sequence for row in part] for part in MicroBatches(**options).split(rows)] == parts


def test_rows_are_assigned_by_hand():
    """Ten tokens and six, then five and four next to them, then three and two."""
    rows = [
        Row((5,) * 10, 1, False, 1.0),
        Row((5,) * 4, 1, True, 1.0),
        Row((5,) * 3, 1, False, 0.0),
        Row((5,) * 6, 1, False, -1.0),
        Row((5,) * 2, 1, False, 0.0),
        Row((5,) * 5, 1, True, 0.0),
    ]
    assert assign_rows(rows, 2) == [[rows[0], rows[1], rows[4]], [rows[2], rows[3], rows[5]]]
    assert assign_rows(rows[:2], 2) == [rows[:1], rows[1:2]]


def test_exchanged_rows_are_renumbered_and_otherwise_unchanged():
    rows = [row._replace(sequence=4, ids=(200_000, *row.ids)) for row in MIXED]
    assert rebalance(rows, 1) == [row._replace(sequence=i) for i, row in enumerate(rows)]
