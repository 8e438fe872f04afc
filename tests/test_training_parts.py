"""Parts of the training loop with fake ranks and models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from gac.data.rows import Row
from gac.methods.base import Mix
from gac.training import policy
from gac.training.feed import Feed
from gac.training.probes.parts import GradientParts, copies
from gac.training.record import Record
from gac.training.trainer import Trainer

from .tiny import tiny_config


def test_copies_of_a_shard_are_counted_over_the_replicated_dimensions() -> None:
    def sharded(*placements):
        mesh = SimpleNamespace(size=lambda dim: (3, 2)[dim])
        return SimpleNamespace(placements=placements, device_mesh=mesh)

    assert copies(sharded(Replicate(), Shard(0))) == 3
    assert copies(sharded(Shard(0), Replicate())) == 2
    assert copies(sharded(Replicate(), Replicate())) == 6
    assert copies(sharded(Shard(0), Shard(1))) == 1
    assert copies(torch.zeros(1)) == 1  # one process


def test_rows_are_balanced_only_with_token_budgets() -> None:
    rows = [Row((5,) * 3, 1, False, 1.0, sequence=7 + i) for i in range(2)]
    assert Feed.balance(SimpleNamespace(uses_balancing=False), rows) is rows
    balanced = Feed.balance(SimpleNamespace(uses_balancing=True, unit=1), rows)
    assert [row.sequence for row in balanced] == [0, 1]


@pytest.mark.parametrize(
    ("weights", "expected", "gradient"),
    [
        ((1.0, 3.0), Mix(0.25, 4.0), [0.5, 0.5, 1.5, 1.5]),
        ((0.0, 0.0), Mix(0.7, 0.0), [0.0] * 4),
        (None, Mix(0.7, 2.0), None),
    ],
)
def test_weights_of_the_two_terms_become_the_mix(weights, expected, gradient) -> None:
    combined: list = []
    parts = SimpleNamespace(needs=SimpleNamespace(parts=2), combine=combined.append)
    assert GradientParts.combine_pair(parts, weights, Mix(0.7, 2.0)) == expected
    assert combined == ([] if gradient is None else [gradient])


def test_no_demonstrations_are_drawn_for_a_method_without_them() -> None:
    method = SimpleNamespace(needs=lambda step: SimpleNamespace(demos=step != 3))
    assert Feed.demo_rows(SimpleNamespace(separate_demos=True, method=method), 3) == []
    assert Feed.demo_rows(SimpleNamespace(separate_demos=False, method=method), 4) == []


def test_the_head_is_checked_before_training(task, tmp_path, monkeypatch) -> None:
    def refuse(model) -> None:
        raise ValueError("the head differs")

    monkeypatch.setattr(policy, "check_head", refuse)
    with pytest.raises(ValueError, match="the head differs"):
        Trainer(tiny_config(task, tmp_path, eval={}))


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("every", [0, 2])
def test_one_process_records_the_samples(main: bool, every: int) -> None:
    texts: list = []
    record = SimpleNamespace(texts=texts, accelerator=SimpleNamespace(is_main_process=main))
    config = SimpleNamespace(sample_every=every, print_samples=False)
    Record.samples(record, 3, [{"prompt": "1+1"}], config)
    Record.samples(record, 4, [], config)
    assert texts == ([{"step": 3, "prompts": [{"prompt": "1+1"}]}] if main and every else [])
