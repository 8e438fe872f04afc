"""The engine `generate`: its cache, how it samples a token, and rows that leave a batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from gac.demo.task import make_tokenizer
from gac.models.causal_lm import make_model
from gac.models.config import ModelConfig
from gac.models.sampling_mode import sampling_mode
from gac.rollouts import generation
from gac.rollouts.generation import BLOCK, generate, sampled
from gac.rollouts.kv_cache import ROOM, GrowingLayer, make_cache
from tools.tiny_models import tiny_config

PROMPTS = [(4, 5, 6), (7,) * 9, (5, 6), (4,) * 7, (8, 9, 10, 11), (6,) * 9]
LIKELIEST = {"temperature": 1.0, "top_p": 1e-6}  # in effect greedy


def tiny_model(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    for weight in model.parameters():  # sharpen the logits, so that greedy decoding has no ties
        weight.data.mul_(3 if weight.dim() > 1 else 1)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture
def calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of each of the model's forwards."""
    found: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, keywords: found.append(tuple(keywords["input_ids"].shape)),
        with_kwargs=True,
    )
    monkeypatch.setattr(model, "supports_padding", True, raising=False)  # tested elsewhere
    yield found
    hook.remove()


# ---- the sampled token


class Draws:
    """In place of `torch.rand`: one given number per row."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def __call__(self, *size: int, **keywords: Any) -> torch.Tensor:
        return self.numbers.reshape(size)


@pytest.mark.parametrize("vocabulary", [3, BLOCK, 3 * BLOCK + 5])
def test_each_token_is_sampled_as_often_as_its_probability_says(vocabulary, monkeypatch):
    torch.manual_seed(0)
    weights = torch.randn(vocabulary).mul(3).exp()
    weights[::3] = 0
    p = weights / weights.sum()
    count = 20_000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    monkeypatch.setattr(torch, "rand", Draws(draws))
    found = torch.bincount(sampled(p.expand(count, -1)), minlength=vocabulary) / count
    assert (found[p == 0] == 0).all()
    assert (found - p).abs().max() <= 1.01 / count


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_0_is_never_sampled(draw, monkeypatch):
    """Also by the smallest and the largest random number."""
    torch.manual_seed(1)
    p = torch.rand(200, 3 * BLOCK).mul(1 / BLOCK)
    p[torch.rand_like(p) < 0.9] = 0
    p[:, 0] = p[:, -1] = p[:, BLOCK - 1] = p[:, BLOCK] = 0
    p[:, 2 * BLOCK :] *= 1e-30
    monkeypatch.setattr(torch, "rand", Draws(torch.full((200,), draw, dtype=torch.float64)))
    assert (p.gather(1, sampled(p)[:, None]) > 0).all()


def test_nan_is_never_sampled():
    p = torch.rand(2, 9)
    p[1, 3] = torch.nan
    with pytest.raises(RuntimeError, match="logits contain nan"):
        sampled(p)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_samples_follow_the_policy(model, temperature, top_p):
    """Total variation distance between 4,000 sampled first tokens and the distribution."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    logits = logits[: len(make_tokenizer())]  # the others are not sampled
    p = (logits / temperature).softmax(-1)
    order = p.argsort(descending=True)
    dropped = order[(p[order].cumsum(0) - p[order]) >= top_p]
    p[dropped] = 0
    torch.manual_seed(0)
    keywords = {"temperature": temperature, "top_p": top_p, "num_generations": 4000}
    found = generate(model, make_tokenizer(), PROMPTS[:1], max_completion_length=1, **keywords)
    counts = torch.bincount(torch.tensor([c[0] for c in found]), minlength=len(p))
    assert len(dropped) == 0 or top_p < 1
    assert counts[dropped].sum() == 0
    assert float((counts / 4000 - p / p.sum()).abs().sum()) / 2 < 0.03


# ---- the cache


def states(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape), torch.randn(*shape)


def test_a_layer_of_the_cache_equals_that_of_transformers():
    """Also after rows were repeated and selected, and tokens removed; it copies them rarely."""
    torch.manual_seed(0)
    own, other = GrowingLayer(), DynamicCache(config=tiny_config("llama")).layers[0]
    places = set()
    rows = 2
    for step, size in enumerate((5, 1, 1, 3, *[1] * (2 * ROOM))):
        if step == 2:
            own.batch_repeat_interleave(3)
            other.batch_repeat_interleave(3)
            rows = 6
        if step == 3:
            kept = torch.tensor([5, 0, 3])
            own.batch_select_indices(kept)
            other.batch_select_indices(kept)
            rows = 3
        if step == 4:
            own.crop(-2)
            other.crop(-2)
        new = states(rows, 2, size, 4)
        for found, expected in zip(own.update(*new), other.update(*new), strict=True):
            assert torch.equal(found, expected)
        assert own.get_seq_length() == other.get_seq_length()
        places.add(own.keys.data_ptr())
    assert len(places) <= 5


def test_under_autocast_the_cache_has_the_dtype_of_the_computation(two_layers):
    """The logits are those of transformers' cache, which stores float32."""
    settings = ModelConfig(path=str(two_layers / "init"), dtype="bfloat16", random_init=True)
    model = make_model(settings, 0, training=True)
    ids = torch.tensor([(4, 5, 6), (7, 8, 9)])
    logits, dtypes = [], []
    for cache in (make_cache(model), DynamicCache(config=model.config)):
        with torch.no_grad(), sampling_mode(model):
            parts = [
                model(part, past_key_values=cache, use_cache=True).logits
                for part in ids.split((1, 1, 1), 1)
            ]
        logits.append(torch.cat(parts, 1))
        dtypes.append(cache.layers[0].keys.dtype)
    assert dtypes == [torch.bfloat16, torch.float32]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("kind", "cached"),
    [
        ("llama", True),
        ("gemma3_text", True),
        ("gpt2", True),
        ("mamba2", False),
        ("falcon_h1", False),
    ],
)
def test_several_samples_equal_one(kind, cached):
    """Whether or not the model has a cache that the engine may change."""
    model, settings = tiny_model(kind), {"max_completion_length": 12}
    assert (make_cache(model) is not None) == cached
    alone = [
        generate(model, make_tokenizer(), [p], temperature=0.0, **settings)[0] for p in PROMPTS
    ]
    several = generate(model, make_tokenizer(), PROMPTS, num_generations=3, **settings, **LIKELIEST)
    assert several == [completion for completion in alone for _ in range(3)]


def test_a_prompt_is_read_once_for_all_of_its_samples(model, calls):
    settings = {"max_completion_length": 3, "num_generations": 4, "temperature": 1.0}
    generate(model, make_tokenizer(), PROMPTS, **settings)
    longest = max(map(len, PROMPTS))
    assert calls[:2] == [(6, longest - 1), (24, 1)]
    assert all(tokens == 1 for _, tokens in calls[1:])
    calls.clear()
    generate(model, make_tokenizer(), [*PROMPTS, (5,)], **settings)  # one token: nothing to share
    assert calls[0] == (28, longest)


# ---- rows that have ended


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("samples", [1, 3])
def test_rows_that_have_ended_leave_the_batch(model, calls, monkeypatch, cached, samples):
    """The responses stay the same, and so does the number of steps."""
    tokenizer = make_tokenizer()
    monkeypatch.setattr(generation, "REREAD_AFTER", 3)
    if not cached:
        monkeypatch.setattr(generation, "make_cache", lambda _: None)
    first = generate(model, tokenizer, PROMPTS, max_completion_length=24, temperature=0.0)
    stops = sorted({completion[4] for completion in first})
    monkeypatch.setattr(generation, "stop_tokens", lambda *_: stops[:2])
    settings = {"num_generations": samples, **LIKELIEST}
    share = "SELECT_SHARE" if cached else "REREAD_SHARE"
    own = getattr(generation, share)
    results, rows = [], []
    for least, limit in ((2.0, 24), (own, 24), (own, 6)):
        calls.clear()
        monkeypatch.setattr(generation, share, least)
        results.append(generate(model, tokenizer, PROMPTS, max_completion_length=limit, **settings))
        rows.append([count for count, _ in calls])
    never, early, short = results
    assert len({len(completion) for completion in never}) > 1
    assert early == never
    assert short == [completion[:6] for completion in never]
    assert len(rows[1]) == len(rows[0])
    assert sum(rows[1]) < 0.9 * sum(rows[0])
    sampling = rows[1][1:] if cached and samples > 1 else rows[1]
    leaving = [pair for pair in itertools.pairwise(sampling) if pair[0] != pair[1]]
    assert leaving
    assert all(before * (1 - own) >= after for before, after in leaving)
