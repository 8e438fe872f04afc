"""Rollout engines: how prompts are batched, and that every engine gives the same responses."""

from __future__ import annotations

import pytest
import torch

from gac.config import ConfigError, load
from gac.errors import RunError
from gac.rollouts import paged
from gac.rollouts.engines import make_engine
from gac.rollouts.generation import Draws, RolloutConfig, _parts, generate
from gac.training.run_config import TrainConfig
from gac.training.trainer import Trainer, train

from .tiny import metrics, tiny_config

PAGES = {"max_batch_tokens": 32, "num_blocks": 64, "page_size": 8}
PROMPTS = [(4, 5, 6), (7,) * 9, (5, 6), (4,) * 7, (8, 9, 10, 11), (6,) * 9]


@pytest.fixture(scope="module")
def policy(task, tmp_path_factory):
    trainer = Trainer(tiny_config(task, tmp_path_factory.mktemp("run") / "run"))
    for p in trainer.model.parameters():  # sharpen the logits, so that greedy decoding has no ties
        p.data.mul_(3 if p.dim() > 1 else 1)
    return trainer.model, trainer.tokenizer


def sample(config, model, tokenizer, prompts, samples):
    return make_engine(config, tokenizer)(model)(prompts, samples)


def rollouts(**changes) -> RolloutConfig:
    given = {"completions": 2, "max_new_tokens": 8, **changes}
    return load(TrainConfig, {"rollouts": given}).rollouts


def test_parts_hold_like_lengths_within_the_budget():
    draws = Draws(max_new_tokens=8, temperature=1.0, samples=2)
    parts = _parts(PROMPTS, draws, None, 68)
    assert sorted(i for part in parts for i in part) == list(range(6))
    for part in parts:
        assert len(part) * 2 * (max(len(PROMPTS[i]) for i in part) + 8) <= 68
    lengths = [[len(PROMPTS[i]) for i in part] for part in parts]
    assert lengths == [[9, 9], [7, 4], [3, 2]]
    assert _parts(PROMPTS, draws, 4, None) == [[1, 5], [3, 4], [0, 2]]
    assert _parts(PROMPTS, draws, None, None) == [list(range(6))]


@pytest.mark.parametrize(
    "how", [{"batch": 4}, {"batch_tokens": 40}, {"engine": "paged", "paged": PAGES}]
)
def test_greedy_answers_do_not_depend_on_the_engine(policy, how):
    stop = [policy[1].decode([15])]  # a token that occurs in some of the responses
    config = rollouts(**how, stop=stop)
    object.__setattr__(
        config, "temperature", 0.0
    )  # bypass validation: rollouts are never greedy, but greedy decoding can be compared
    settings = {"max_new_tokens": 8, "temperature": 0, "stop": stop}
    alone = [generate(*policy, [p], **settings)[0] for p in PROMPTS]
    assert sample(config, *policy, PROMPTS, 1) == alone
    assert len(set(alone)) > 3 and len(set(map(len, alone))) > 1
    assert policy[0].training


@pytest.mark.parametrize("how", [{"batch_tokens": 80}, {"engine": "paged", "paged": PAGES}])
def test_sampling_is_repeatable_and_follows_the_seed(policy, how):
    config = rollouts(**how)

    def drawn(seed):
        torch.manual_seed(seed)
        return sample(config, *policy, PROMPTS, 3)

    one = drawn(0)
    assert len(one) == 18 and all(0 < len(r) <= 8 for r in one)
    assert drawn(0) == one != drawn(1)
    stop = policy[1].eos_token_id
    assert all(stop not in r[:-1] for r in one)


def test_paged_samples_from_the_policys_own_distribution(policy):
    """Total variation distance between 1500 sampled first tokens and the model's softmax."""
    model, tokenizer = policy
    torch.manual_seed(0)
    config = rollouts(engine="paged", paged=PAGES, max_new_tokens=1, temperature=0.7)
    model.generation_config.top_k = 1  # the checkpoint's generation defaults must be ignored
    drawn = sample(config, model, tokenizer, [PROMPTS[0]], 1500)
    model.generation_config.top_k = None
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    p = (logits / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor([r[0] for r in drawn]), minlength=len(p)) / len(drawn)
    assert float((counts - p).abs().sum()) / 2 < 0.06


def test_a_run_with_pages_is_repeatable_and_says_what_it_sampled(task, tmp_path):
    rollouts = {
        "prompts": 2,
        "completions": 3,
        "max_new_tokens": 5,
        "engine": "paged",
        "paged": PAGES,
    }
    for name in "ab":
        train(tiny_config(task, tmp_path / name, steps=2, eval={}, rollouts=rollouts))
    one, two = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert one == two
    for row in one:
        assert 6 <= row["sampled_tokens"] <= 30
        assert row["sampled_tokens"] >= row["response_length"] * 6 - 1e-6


def test_responses_that_do_not_arrive_end_the_run(policy, monkeypatch):
    model, tokenizer = policy
    monkeypatch.setattr(model, "generate_batch", lambda *a, **k: {}, raising=False)
    with pytest.raises(RunError, match="0 of 2 responses arrived.*last checkpoint"):
        paged.generate_paged(model, tokenizer, PROMPTS[:2], Draws(4, 1.0), rollouts().paged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollouts": {"engine": "fast"}}, "engine='fast': use one of generate, paged, vllm"),
        (
            {"rollouts": {"batch_tokens": 9, "completions": 2, "max_new_tokens": 8}},
            "batch_tokens=9: the 2 rollouts",
        ),
        ({"rollouts": {"paged": {"page_size": 2}}}, "page_size=2: use a number >= 4"),
        ({"rollouts": {"engine": "paged"}, "parallel": {"mode": "fsdp"}}, "whole model"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ConfigError, match=message):
        load(TrainConfig, changes)


def test_a_budget_below_the_longest_prompt(task, tmp_path):
    rollouts = {"prompts": 4, "completions": 4, "max_new_tokens": 5, "batch_tokens": 24}
    with pytest.raises(ConfigError, match="rollouts.batch_tokens=24: 4 rows that stay together"):
        Trainer(tiny_config(task, tmp_path / "run", rollouts=rollouts))
