"""Generation with a scripted model: padding, order, shrinking batches, settings of the engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from gac.demo.task import make_tokenizer
from gac.rollouts import generation
from gac.rollouts.generation import (
    SamplingParams,
    _equal_lengths,
    _supports_padding,
    generate,
    generation_config,
    sampling_mode,
)

WORDS = make_tokenizer()  # <pad> is 0, <eos> is 1, "2" is 5


class Scripted(nn.Module):
    """A model whose `generate` is a function."""

    def __init__(self, respond) -> None:
        super().__init__()
        self.inner, self.kept = nn.Embedding(8, 2), nn.Dropout().eval()
        self.generate, self.generation_config = respond, "own"
        self.config = SimpleNamespace(_attn_implementation="sdpa_by_rows")

    def get_input_embeddings(self) -> nn.Module:
        return self.inner


def test_prompts_are_padded_on_the_left_and_responses_are_in_order(monkeypatch) -> None:
    """Four rows at once, the longest prompt first; then another rank needs one more call."""
    calls, count = [], 0

    def respond(input_ids, attention_mask, generation_config, stopping_criteria, synced_gpus):
        nonlocal count
        assert not model.training and isinstance(model.generation_config, GenerationConfig)
        calls.append((input_ids.tolist(), attention_mask.tolist()))
        rows = input_ids.repeat_interleave(generation_config.num_return_sequences, 0)
        first = torch.arange(count, count + len(rows))[:, None] + 20
        count += len(rows)
        return torch.cat([rows, first, torch.tensor([[5, 1, 7]] * len(rows))], 1)

    monkeypatch.setattr(generation, "required_calls", lambda model, own: own + 1)
    model, prompts = Scripted(respond), [(4, 6), (6, 7, 8, 9), (3,)]
    model.__dict__["supports_padding"] = True
    settings = {
        "max_completion_length": 4,
        "temperature": 0.7,
        "num_generations": 2,
        "stop": ("2",),
    }
    responses = generate(model, WORDS, prompts, batch=4, **settings)
    assert responses == [(i, 5) for i in (22, 23, 20, 21, 24, 25)]
    both = [[6, 7, 8, 9], [0, 0, 4, 6]], [[1] * 4, [0, 0, 1, 1]]
    assert calls == [both, ([[3]], [[1]]), ([[1]], [[1]])]
    calls.clear()
    generate(model, WORDS, prompts, batch_tokens=2 * 5, **settings)
    assert [ids for ids, _ in calls] == [[[6, 7, 8, 9]], [[4, 6]], [[3]], [[1]]]
    calls.clear()
    model.__dict__["supports_padding"] = False
    responses = generate(model, WORDS, [*prompts, (5, 4)], **settings)
    assert responses == [(i, 5) for i in (36, 37, 40, 41, 42, 43, 38, 39)]
    assert [ids for ids, _ in calls] == [[[4, 6], [5, 4]], [[6, 7, 8, 9]], [[3]], [[1]]]
    assert _equal_lengths(prompts, [1, 2]) == [[1], [2]]


@pytest.mark.parametrize(
    ("limit", "samples", "expected"),
    [
        (14, 1, [(4, 14, 1), (2, 12, 1), (1, 8, 1)]),
        (8, 1, [(4, 8, 1), (2, 6, 1), (1, 2, 1)]),
        (6, 1, [(4, 6, 1), (2, 4, 1)]),
        (6, 2, [(8, 6, 2), (4, 4, 1)]),
    ],
)
def test_a_batch_shrinks_whenever_half_of_its_rows_have_ended(
    monkeypatch, limit, samples, expected
) -> None:
    """A model that counts down to <eos>, 1; at least two tokens are generated before a batch
    shrinks. `expected` has the rows, the limit and the samples of each call.
    """
    calls = []

    def count_down(input_ids, attention_mask, generation_config, stopping_criteria, synced_gpus):
        settings = generation_config
        ids = input_ids.repeat_interleave(settings.num_return_sequences, 0)
        calls.append((len(ids), settings.max_new_tokens, settings.num_return_sequences))
        assert attention_mask.shape == input_ids.shape
        assert torch.equal(attention_mask, (input_ids != 0).long()) and settings.max_new_tokens > 0
        for _ in range(settings.max_new_tokens):
            ids = torch.cat([ids, (ids[:, -1:] - 1).clamp(min=0)], 1)
            stop = stopping_criteria(ids, None)
            assert len(stop.unique()) == 1
            if stop[0]:
                break
        return ids

    monkeypatch.setattr(generation, "SHRINK_AFTER", 2)
    monkeypatch.setattr(generation, "in_lockstep", lambda model: False)
    ids = torch.tensor([[0, 13], [0, 2], [9, 7], [9, 2]])
    params = SamplingParams(limit, 1.0, num_generations=samples)
    rows = generation._continue(
        SimpleNamespace(generate=count_down),
        ids,
        (ids != 0).long(),
        generation_config(params, [1], 0),
        [1],
    )
    wanted = [[*range(12, 0, -1)], [1], [6, 5, 4, 3, 2, 1], [1]]
    ends = min(limit, 12), 1, 6, 1
    assert [row[:end] for row, end in zip(rows[::samples], ends, strict=True)] == [
        row[:limit] for row in wanted
    ]
    assert rows[::samples] == rows[samples - 1 :: samples] and calls == expected


@pytest.mark.parametrize(
    ("device", "lockstep", "shrinks"), [("cpu", False, 1), ("cpu", True, 0), ("meta", False, 0)]
)
def test_rows_leave_a_batch_only_on_a_cpu_and_without_other_ranks(
    monkeypatch, device, lockstep, shrinks
) -> None:
    """In lockstep, the ranks would otherwise call the model a different number of times."""
    calls = []

    def one_token(**keywords):
        calls.append((len(keywords["stopping_criteria"]), keywords["synced_gpus"]))
        return torch.tensor([[3, 4, 1]])

    monkeypatch.setattr(generation, "in_lockstep", lambda model: lockstep)
    model, ids = SimpleNamespace(generate=one_token), torch.tensor([[3, 4]])
    settings = generation_config(SamplingParams(5, 1.0), [1], 0)
    rows = generation._continue(model, ids.to(device), torch.ones_like(ids), settings, [1])
    assert rows == [[1]] and calls == [(shrinks, lockstep)]


@pytest.mark.parametrize(("alone", "supported"), [(0.0, True), (-0.02, False)])
def test_padding_may_change_the_logits_by_a_twentieth_of_the_effect_of_tokens(
    monkeypatch, caplog, alone, supported
) -> None:
    calls = []

    def respond(input_ids, attention_mask, generation_config, synced_gpus):
        calls.append((input_ids.tolist(), attention_mask.tolist(), synced_gpus))
        both = [[0.1, 1.0], [0.1, -1.0]]
        return SimpleNamespace(
            logits=[torch.tensor(both if len(input_ids) > 1 else [[alone, 1.0]])]
        )

    monkeypatch.setattr(generation, "in_lockstep", lambda model: True)
    model = Scripted(respond)
    assert [_supports_padding(model, 7) for _ in range(2)] == [supported] * 2
    ((rows, mask, _), (single, ones, _)) = calls
    assert rows == [[7, 7, 7, 3, 4, 5], [6, 7, 0, 1, 2, 3]] and single == [[3, 4, 5]]
    assert mask == [[0, 0, 0, 1, 1, 1], [1] * 6]
    assert ones == [[1, 1, 1]] and all(synced for _, _, synced in calls)
    assert ("Scripted samples differently" in caplog.text) != supported


def test_settings_of_transformers() -> None:
    names = "max_new_tokens do_sample temperature top_p top_k num_return_sequences eos_token_id"
    for temperature, samples, expected in (
        (0.7, 3, [4, True, 0.7, 0.9, 0, 3, [1, 5]]),
        (0.0, 1, [4, False, None, None, None, 1, [1, 5]]),
    ):
        params = SamplingParams(4, temperature, 0.9, samples)
        settings = generation_config(params, [1, 5], 0)
        assert [getattr(settings, name) for name in names.split()] == expected
        assert settings.pad_token_id == 0 and settings.use_cache


def test_sampling_changes_the_model_only_for_a_while() -> None:
    model = Scripted(None)
    with pytest.raises(KeyError), sampling_mode(model):
        assert not any(module.training for module in model.modules())
        assert isinstance(model.generation_config, GenerationConfig)
        assert model.config._attn_implementation == "sdpa"
        raise KeyError
    assert model.training and model.inner.training and not model.kept.training
    assert model.generation_config == "own"
