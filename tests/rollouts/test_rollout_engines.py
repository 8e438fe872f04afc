"""Rollout engines: how prompts are batched, and that every engine gives the same responses."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from gac.config import load
from gac.demo.task import make_tokenizer
from gac.errors import ConfigError, RunError
from gac.rollouts.config import PagedConfig, RolloutConfig
from gac.rollouts.engines import Engine, _generate_paged
from gac.rollouts.generation import SamplingParams, _parts, generate
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer, train
from tests.tiny import metrics, tiny_config
from tools.tiny_models import tiny_config as tiny_model_config

PAGES = {"max_batch_tokens": 32, "num_blocks": 64, "block_size": 8}
PROMPTS = [(4, 5, 6), (7,) * 9, (5, 6), (4,) * 7, (8, 9, 10, 11), (6,) * 9]


@pytest.fixture(scope="module")
def policy(two_layers, tmp_path_factory):
    trainer = Trainer(tiny_config(two_layers, tmp_path_factory.mktemp("run") / "run"))
    for p in trainer.model.parameters():  # sharpen the logits, so that greedy decoding has no ties
        p.data.mul_(3 if p.dim() > 1 else 1)
    return trainer.model.train(), trainer.tokenizer


def sample(config, model, tokenizer, prompts, samples):
    return Engine(config, tokenizer).load(model).generate(prompts, samples)


def rollouts(**changes) -> RolloutConfig:
    settings = {"num_generations": 2, "max_completion_length": 8, **changes}
    return load(TrainConfig, {"rollouts": settings}).rollouts


def test_parts_group_similar_lengths_within_the_budget():
    params = SamplingParams(max_completion_length=8, temperature=1.0, num_generations=2)
    parts = _parts(PROMPTS, params, None, 68)
    assert sorted(i for part in parts for i in part) == list(range(6))
    for part in parts:
        assert len(part) * 2 * (max(len(PROMPTS[i]) for i in part) + 8) <= 68
    assert [[len(PROMPTS[i]) for i in part] for part in parts] == [[9, 9], [7, 4], [3, 2]]
    assert _parts(PROMPTS, params, 4, None) == [[1, 5], [3, 4], [0, 2]]
    assert _parts(PROMPTS, params, None, None) == [list(range(6))]
    for batch, tokens in ((None, 1), (1, None)):  # at least one prompt
        assert all(len(part) == 1 for part in _parts(PROMPTS, params, batch, tokens))


def test_any_token_of_a_large_vocabulary_is_sampled(policy):
    """transformers' default is to sample one of the 50 most likely tokens."""
    shape = copy.deepcopy(policy[0].config)
    shape.vocab_size = 400
    model, prompt = AutoModelForCausalLM.from_config(shape), [(4, 5, 6)]
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(400 - len(tokenizer))])
    found = generate(
        *(model, tokenizer, prompt), max_completion_length=1, temperature=1.0, num_generations=400
    )
    assert len(set(found)) > 100


PAGED = {"engine": "paged", "paged": PAGES}
FULL = pytest.mark.full(reason="seconds; the run below is repeated too")


@pytest.mark.parametrize(
    ("engine_settings", "most"),
    [({"generation_batch_size": 4}, 4), ({"generation_batch_tokens": 40}, 2), (PAGED, 0)],
)
def test_greedy_responses_do_not_depend_on_the_engine(policy, monkeypatch, engine_settings, most):
    stop = [policy[1].decode([15])]  # a token that occurs in some of the responses
    config = rollouts(**engine_settings, stop=stop)
    # bypass validation: rollouts are never greedy, but greedy responses can be compared
    object.__setattr__(config, "temperature", 0.0)
    settings = {"max_completion_length": 8, "temperature": 0, "stop": stop}
    expected = [generate(*policy, [prompt], **settings)[0] for prompt in PROMPTS]
    sizes, original = [0], policy[0].generate
    monkeypatch.setattr(
        policy[0], "generate", lambda **k: sizes.append(len(k["input_ids"])) or original(**k)
    )
    assert sample(config, *policy, PROMPTS, 1) == expected
    assert max(sizes) == most
    assert len(set(expected)) > 3
    assert len(set(map(len, expected))) > 1
    assert policy[0].training


@pytest.mark.parametrize(
    "engine_settings", [{"generation_batch_tokens": 80}, pytest.param(PAGED, marks=FULL)]
)
def test_sampling_is_repeatable_and_follows_the_seed(policy, engine_settings):
    config = rollouts(**engine_settings)

    def sample_with_seed(seed):
        torch.manual_seed(seed)
        return sample(config, *policy, PROMPTS, 3)

    responses = sample_with_seed(0)
    assert len(responses) == 18
    assert all(0 < len(r) <= 8 for r in responses)
    assert sample_with_seed(0) == responses != sample_with_seed(1)
    stop = policy[1].eos_token_id
    assert all(stop not in r[:-1] for r in responses)


def test_paged_samples_follow_the_policy(policy):
    """Total variation distance between 1500 sampled first tokens and the model's softmax."""
    model, tokenizer = policy
    torch.manual_seed(0)
    config = rollouts(engine="paged", paged=PAGES, max_completion_length=1, temperature=0.7)
    model.generation_config.top_k = 1  # the checkpoint's generation defaults must be ignored
    samples = sample(config, model, tokenizer, [PROMPTS[0]], 1500)
    model.generation_config.top_k = None
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    p = (logits / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor([r[0] for r in samples]), minlength=len(p))
    assert float((counts / len(samples) - p).abs().sum()) / 2 < 0.06


def test_paged_run_is_repeatable_and_logs_sampled_tokens(task, tmp_path):
    rollouts = {"num_prompts": 2, "num_generations": 3, "max_completion_length": 5, **PAGED}
    for name in "ab":
        train(tiny_config(task, tmp_path / name, steps=1, eval={}, rollouts=rollouts))
    first, second = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert first == second
    for row in first:
        assert 6 <= row["sampled_tokens"] <= 30
        assert row["sampled_tokens"] >= row["completions/mean_length"] * 6 - 1e-6


def test_paged_settings_and_missing_responses(policy, monkeypatch):
    """By default, the cache holds all: 3 x (1 + 2 + 1) pages for 7, 13 and 6 tokens."""
    calls, errors = [], [None] * 9

    def respond(prompts, *, generation_config, continuous_batching_config):
        assert not policy[0].training
        calls.append((prompts, generation_config, continuous_batching_config))
        return {
            f"{i}": SimpleNamespace(error=error, generated_tokens=[20 + i, 1])
            for i, error in enumerate(errors)
        }

    monkeypatch.setattr(policy[0], "generate_batch", respond, raising=False)
    params = SamplingParams(4, 0.7, 0.9, num_generations=3, stop=(policy[1].decode([15]),))
    for settings in ({"block_size": 8}, {**PAGES, "block_size": 4}):
        torch.manual_seed(1)
        responses = _generate_paged(*policy, PROMPTS[:3], params, PagedConfig(**settings))
        assert responses == [(20 + i, 1) for i in range(9)]
    for left, message in (
        ([None, "full", None], r"2 of 9 completions were generated \(full\): lower .*rerun"),
        ([*[None] * 8, "full"], r"8 of 9 completions were generated \(full\): lower"),
        ([None] * 8, "8 of 9 completions were generated: lower"),
    ):
        errors[:] = left
        with pytest.raises(RunError, match=message):
            _generate_paged(*policy, PROMPTS[:3], params, PagedConfig())
    sizes = [(c.max_batch_tokens, c.num_blocks, c.block_size) for *_, c in calls]
    assert sizes[:3] == [(256, 12, 8), (32, 64, 4), (256, 9, 256)]
    prompts, own, pages = calls[0]
    assert prompts == [[4, 5, 6], [7] * 9, [5, 6]]
    assert own.num_return_sequences == 3
    assert sorted(own.eos_token_id) == [1, 15]
    assert (own.top_p, own.temperature) == (0.9, 0.7)
    assert pages.seed == calls[1][2].seed == 2135392491
    assert not pages.auto_switch_to_flash


TOO_FEW_TOKENS = {"generation_batch_tokens": 9, "num_generations": 2, "max_completion_length": 8}
INVALID = [
    ({"rollouts": {"engine": "fast"}}, "engine='fast': use one of generate, paged, vllm"),
    (
        {"rollouts": {"scale_rewards": "max"}},
        "scale_rewards='max': use one of std, centered, batch",
    ),
    ({"rollouts": {"correction": "max"}}, "correction='max': use one of "),
    ({"rollouts": TOO_FEW_TOKENS}, "generation_batch_tokens=9: .* at least 18 tokens"),
    ({"rollouts": {"paged": {"block_size": 2}}}, "block_size=2: use an integer >= 4"),
    (
        {"rollouts": {"engine": "paged", "generation_batch_size": 4}},
        "rollouts.generation_batch_size=4 has no effect without rollouts.engine=generate",
    ),
    (
        {"rollouts": {"engine": "vllm", "generation_batch_tokens": 99999}},
        "rollouts.generation_batch_tokens=99999 has no effect without rollouts.engine=generate",
    ),
    (
        {"optim": {"schedule": "constant", "min_lr_ratio": 0.5}},
        "min_lr_ratio=0.5 has no effect without optim.schedule=cosine or optim.schedule=linear",
    ),
    ({"rollouts": {"engine": "paged"}, "parallel": {"mode": "fsdp"}}, "paged.*full model"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_bad_settings(changes, message):
    with pytest.raises(ConfigError, match=message):
        load(TrainConfig, changes)


def test_a_whole_number_satisfies_a_condition_on_a_float():
    assert TrainConfig(
        rollouts=RolloutConfig(engine="vllm", temperature=1, top_p=1, correction="none")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generation_batch_tokens": 24}, "rollouts.generation_batch_tokens=24: the 4 rollouts"),
        ({"stop": ["20"]}, "stop='20' is 2 tokens: use a string"),
    ],
)
def test_settings_are_checked_before_the_model_is_loaded(task, tmp_path, change, message):
    rollouts = {"num_prompts": 4, "num_generations": 4, "max_completion_length": 5, **change}
    model = {"path": str(task / "init")}  # has no weights
    with pytest.raises(ConfigError, match=message):
        Trainer(tiny_config(task, tmp_path / "run", rollouts=rollouts, model=model))


@pytest.mark.parametrize(("kind", "supported"), [("llama", True), ("rwkv", False)])
def test_models_that_read_the_padding_generate_prompts_of_equal_length(kind, supported, caplog):
    """Each response equals that of its prompt alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_model_config(kind)).eval()
    # a constant does not change the probabilities
    model.get_output_embeddings().register_forward_hook(lambda _, x, logits: logits + 100.0)
    prompts = [(5, 6, 7), (8, 9, 10, 11, 12), (5, 9)]
    keywords = {"max_completion_length": 4, "temperature": 0.0}
    together = generate(model, make_tokenizer(), prompts, **keywords)
    assert model.supports_padding == supported
    assert ("of equal length" in caplog.text) != supported
    assert together == [generate(model, make_tokenizer(), [p], **keywords)[0] for p in prompts]
