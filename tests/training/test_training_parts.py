"""Parts of the training loop with fake ranks and models."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from tqdm import tqdm

from gac.config import load
from gac.control.term_pair import TermPair
from gac.data.rows import Counts
from gac.methods import Observation
from gac.methods.base import Mix, StepNeeds
from gac.models.causal_lm import load_tokenizer
from gac.training import policy
from gac.training.feed import Feed
from gac.training.metrics import observe
from gac.training.probes.parts import GradientParts, copies
from gac.training.record import Logbook, Record
from gac.training.run_config import TrainConfig
from gac.training.step import Measured, Rewards, Step, Update
from gac.training.trainer import Trainer, _update_bar
from gac_kernels import TokenMoments
from tests.tiny import tiny_config


def test_copies_of_a_shard_are_counted_over_the_replicated_dimensions(monkeypatch) -> None:
    def sharded(*placements):
        mesh = SimpleNamespace(size=lambda dim: (3, 2)[dim])
        return SimpleNamespace(placements=placements, device_mesh=mesh)

    assert copies(sharded(Replicate(), Shard(0))) == 3
    assert copies(sharded(Shard(0), Replicate())) == 2
    assert copies(sharded(Replicate(), Replicate())) == 6
    assert copies(sharded(Shard(0), Shard(1))) == 1
    monkeypatch.setattr("gac.training.probes.parts.world_size", lambda: 5)
    assert copies(torch.zeros(1)) == 5  # DDP


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
    parts = SimpleNamespace(needs=SimpleNamespace(parts=2), combine=combined.append, parts=[1])
    assert GradientParts.combine_pair(parts, weights, Mix(0.7, 2.0)) == expected
    assert combined == ([] if gradient is None else [gradient])
    assert weights is not None or parts.parts == []


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
    config = SimpleNamespace(log_samples_every=every, print_samples=False)
    Record.samples(record, 3, [{"prompt": "1+1"}], config)
    Record.samples(record, 4, [], config)
    assert texts == ([{"step": 3, "prompts": [{"prompt": "1+1"}]}] if main and every else [])


@pytest.mark.parametrize("main", [True, False])
def test_trackers_get_the_numbers_that_were_measured(main: bool) -> None:
    rows, logged = [], []
    accelerator = SimpleNamespace(
        is_main_process=main, log=lambda *a, step: logged.append((*a, step))
    )
    row = {"step": 3, "mu": 0.5, "kl": None}
    Record.step(SimpleNamespace(metrics=rows, accelerator=accelerator), row)
    assert rows == [row] * main and logged == [({"mu": 0.5}, 3)]


def test_the_progress_bar_shows_what_was_measured() -> None:
    with tqdm(total=2, file=io.StringIO()) as bar:
        _update_bar(bar, {"mu": 0.25, "reward_mean": None, "kl": math.nan, "entropy": 1.23456})
        assert (bar.n, bar.postfix) == (1, "mu=0.25, entropy=1.23")


@pytest.mark.parametrize(
    ("rollouts", "correction"),
    [
        ({}, "sequence_mask"),
        ({"correction": "token_truncate"}, "token_truncate"),
        # a server's log-probs are those of the untruncated distribution at temperature 1
        ({"temperature": 0.7}, "none"),
        ({"top_p": 0.9}, "none"),
        ({"engine": "generate"}, "none"),
    ],
)
def test_only_comparable_log_probs_of_a_server_are_corrected(rollouts, correction) -> None:
    rollouts = {"engine": "vllm", "max_completion_length": 7, "correction_max": 3.5, **rollouts}
    spec = policy.loss_of(load(TrainConfig, {"rollouts": rollouts})).spec
    assert (spec.correction, spec.max_tokens) == (correction, 7)
    assert (spec.correction_max == 3.5) == (correction != "none")
    rollouts = {"max_completion_length": 7}
    loss = {"rollout_reduction": "constant", "max_tokens": 9}
    config = load(TrainConfig, {"rollouts": rollouts, "loss": loss})
    assert policy.loss_of(config).spec.max_tokens == 9


STEP = Step(
    4, (), Mix(0.5), Counts(1, 2, 1, 2, 2, 6), Rewards.of([1.0, 0.0]), StepNeeds(), (), seed=1
)


def test_a_skipped_step_is_observed_only_by_its_number() -> None:
    measured = Measured(TermPair(demo=1.0, rollout=2.0), TokenMoments.zeros())
    for fault in (None, "grad_norm is nan"):
        row, observation = observe(STEP, measured, Update(Mix(0.5), 1.0, 0.1, fault))
        assert row["step"] == observation.step == 5 and row["reward_mean"] == 0.5
        assert (observation == Observation(5)) == (fault is not None)


def test_steps_of_earlier_versions_may_have_more_needs() -> None:
    plain = STEP.plain()
    assert Step.restore(plain) == STEP
    assert Step.restore(plain | {"needs": (*STEP.needs, True)}) == STEP


def test_a_fresh_run_starts_with_empty_logs(tmp_path) -> None:
    book = Logbook(tmp_path / "eval.jsonl")
    logs = SimpleNamespace(metrics=book, evals=book, texts=book)
    logs.accelerator = SimpleNamespace(is_main_process=True)
    for step, kept in ((0, [0]), (None, [])):
        book.append({"step": 0})
        book.append({"step": 1})
        Record.truncate(logs, step)
        assert [row["step"] for row in book.read()] == kept


def test_prompts_and_demonstrations_are_shuffled_differently(task, tmp_path) -> None:
    data = dict.fromkeys(("prompts", "demos"), str(task / "prompts.jsonl"))
    config = tiny_config(task, tmp_path, data=data)
    feed = Feed(config, load_tokenizer(config.model), 0, 1)
    prompts = feed.prompt_order.take(16)
    demos = feed.demo_order.take(16)
    assert sorted(prompts) == sorted(demos) == list(range(16)) and prompts != demos


def test_an_epoch_of_less_than_one_batch_is_one_step(task, tmp_path) -> None:
    method = {"name": "sft-best", "examples": 2, "epochs": 1}
    config = tiny_config(task, tmp_path, method=method)
    assert Feed(config, load_tokenizer(config.model), 0, 1).steps == 1
