"""Parts of loading and checking a model, on small folders and fake models."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gac.demo.task import make_tokenizer
from gac.errors import ConfigError
from gac.models import head, row_attention
from gac.models.causal_lm import (
    LoraConfig,
    ModelConfig,
    _disable_noise,
    _training_config,
    apply_training_options,
    load_tokenizer,
)
from gac.models.head import Head
from gac.models.weights import _check, base_folder


def test_packed_heads_keep_their_parts_in_place() -> None:
    hidden, weight, bias = torch.zeros(2, 3, 4), torch.zeros(7, 4), torch.zeros(7)
    packed = Head(hidden, weight, bias).packed()
    assert packed.hidden.shape == (6, 4) and packed.logits is None
    assert packed.weight is weight and packed.bias is bias
    packed = Head(None, logits=torch.zeros(2, 3, 7)).packed()
    assert packed.logits.shape == (6, 7) and packed.hidden is None and packed.bias is None


def test_code_after_the_head_sees_every_dimension() -> None:
    shapes = []
    hidden = torch.zeros(2, 3, 4)
    returned = head._head_input(lambda x: shapes.append(head._in_head.get()(x).shape), hidden)
    assert returned is hidden and shapes == [(2, 3, 0)]


@pytest.mark.parametrize(
    ("dtype", "change", "causal"),
    [
        (torch.float32, 1e-5, True),
        (torch.float32, 1e-3, False),
        (torch.bfloat16, 1e-2, True),
        (torch.bfloat16, 1e-1, False),
    ],
)
def test_rounding_is_no_dependence_on_later_tokens(dtype, change, causal) -> None:
    """Changes are relative to the largest logit; the other logits are 0."""
    embeddings = torch.nn.Embedding(8, 2)
    seen: list[int] = []

    def forward(input_ids, use_cache):
        seen.append(len(seen))
        logits = torch.tensor([1.0, 0.0]).expand(*input_ids.shape, 2)
        return SimpleNamespace(logits=logits * (1 + change * len(seen)))

    forward.parameters = embeddings.parameters
    config = SimpleNamespace(model_type="fake")
    patched = SimpleNamespace(dtype=dtype, config=config, get_input_embeddings=lambda: embeddings)
    if causal:
        head._check_causal(forward, patched)
    else:
        with pytest.raises(ConfigError, match="'fake' is an encoder"):
            head._check_causal(forward, patched)
    assert len(seen) == 2


def test_the_base_of_adapters(tmp_path) -> None:
    assert base_folder(str(tmp_path)) == str(tmp_path)
    for base, expected in (("other", "other"), (None, str(tmp_path))):
        text = json.dumps({"base_model_name_or_path": base})
        (tmp_path / "adapter_config.json").write_text(text)
        assert base_folder(str(tmp_path)) == expected


def test_only_causal_models_are_trained(tmp_path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model type 't5' is not a causal language model"):
        _training_config(ModelConfig(path=str(tmp_path)))


def test_padding_uses_the_eos_token_only_if_there_is_no_other(tmp_path) -> None:
    for name, pad in (("with", True), ("without", False)):
        words = make_tokenizer()
        words.pad_token = words.convert_ids_to_tokens(5) if pad else None
        words.save_pretrained(tmp_path / name)
        loaded = load_tokenizer(ModelConfig(path=str(tmp_path / name)))
        assert loaded.pad_token_id == (5 if pad else loaded.eos_token_id)
        assert loaded.eos_token_id != 5


@pytest.mark.parametrize(
    "name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"]
)
def test_checkpointing_is_enabled_under_either_name(name: str) -> None:
    calls: list = []
    model = SimpleNamespace(config=SimpleNamespace(use_cache=True), **{name: calls.append})
    config = ModelConfig(path="x", gradient_checkpointing=True)
    assert apply_training_options(model, config) is model
    assert calls == [{"use_reentrant": False}] and model.config.use_cache is False


def test_row_attention_is_restored_after_a_plain_block() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = AutoConfig.for_model("qwen2", **sizes, num_attention_heads=2, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    for enabled in (False, True):
        assert not enabled or row_attention.enable(model)
        before = model.config._attn_implementation
        with row_attention.plain(model):
            assert model.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == before
        assert (before == row_attention.NAME) == enabled


@pytest.mark.parametrize("targets", [(), ""])
def test_adapters_need_targets(targets) -> None:
    with pytest.raises(ValueError, match=re.escape(f"targets={targets!r}: use")):
        LoraConfig(targets=targets)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_only_the_dropout_of_adapters_stays_in_training_mode(dropout, caplog) -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.RReLU()).train()
    _disable_noise(model, LoraConfig(dropout=dropout))
    assert [module.training for module in model] == [dropout > 0, False]
    assert ("sampling has no dropout" in caplog.text) == (dropout > 0)


@pytest.mark.parametrize("keep", [False, True])
def test_dropout_is_removed_unless_requested(tmp_path, keep) -> None:
    AutoConfig.for_model("gpt2", resid_pdrop=0.25, attn_pdrop=0.0).save_pretrained(tmp_path)
    config = _training_config(ModelConfig(path=str(tmp_path), dropout=keep))
    assert (config.resid_pdrop, config.attn_pdrop) == (0.25 if keep else 0.0, 0.0)


@pytest.mark.parametrize(("missing", "text"), [("a", "a: copy"), ("cab", "a and 2 more: copy")])
def test_missing_weights_are_counted(missing, text) -> None:
    info = {"mismatched_keys": [], "missing_keys": list(missing)}
    with pytest.raises(ConfigError, match=f"model.path='x': the weights do not contain {text}"):
        _check("model.path", "x", info)
