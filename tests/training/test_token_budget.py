"""`budget_tokens` ends a run at the budget of the paper's appendix H, also after a resume."""

import itertools
import logging

import pytest

from gac.report.reading import read_run
from gac.training.trainer import Trainer, train
from tests.tiny import metrics, tiny_config


def budget_of(task, tmp_path, steps):
    """The tokens of the first `steps` steps, from the rows that are trained on."""
    trainer = Trainer(tiny_config(task, tmp_path / "rows", steps=9, eval={}))
    total = 0
    for _ in range(steps):
        total += sum(len(row.ids) for row in trainer._sample())
        trainer.step += 1
    trainer.heartbeat.stop()
    return total


def test_a_run_ends_with_the_step_that_reaches_the_budget(task, tmp_path, caplog):
    """The first step's rows do not depend on the weights, so their tokens are known beforehand."""
    first = budget_of(task, tmp_path, steps=1)
    for budget, steps in ((first, 1), (first + 1, 2)):
        out = tmp_path / str(budget)
        config = tiny_config(task, out, steps=9, eval={}, budget_tokens=budget)
        rows = metrics(train(config))
        assert len(rows) == steps
        assert rows[-1]["ended"] == 1
        assert sum(row["tokens"] for row in rows) >= budget > sum(r["tokens"] for r in rows[:-1])
        assert read_run(out).steps_planned == steps
    caplog.set_level(logging.INFO)
    train(config)
    assert "to train on, raise `budget_tokens`" in caplog.text


def test_a_resumed_run_counts_the_tokens_from_before(task, tmp_path):
    changes = {"steps": 9, "eval": {}, "checkpoint_every": 1}
    whole = metrics(train(tiny_config(task, tmp_path / "whole", **changes)))
    spent = list(itertools.accumulate(row["tokens"] for row in whole))
    train(tiny_config(task, tmp_path / "run", **changes, budget_tokens=spent[2]))
    out = train(tiny_config(task, tmp_path / "run", **changes, budget_tokens=spent[5]))
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in whole[:6]]


def test_the_norm_of_an_update_is_that_of_the_weights(task, tmp_path):
    config = tiny_config(task, tmp_path, steps=2, eval={}, log_update_norm=True)
    trainer = Trainer(config)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    row = trainer._train_step()
    after = list(trainer.model.parameters())
    moved = (
        sum(float(((a.detach() - b) ** 2).sum()) for a, b in zip(after, before, strict=True)) ** 0.5
    )
    assert row["update_norm"] == pytest.approx(moved, rel=1e-5)
    trainer.heartbeat.stop()
