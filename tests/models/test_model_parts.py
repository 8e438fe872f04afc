"""Parts of loading and checking a model, on small folders and fake models."""

import json
import re
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gac.demo.task import make_tokenizer
from gac.errors import ConfigError
from gac.models import head, precision, row_attention, source
from gac.models.causal_lm import (
    _disable_noise,
    _training_config,
    apply_training_options,
    load_meta_model,
    load_model,
    load_tokenizer,
    make_model,
)
from gac.models.config import LoraConfig, ModelConfig
from gac.models.head import Head
from gac.models.pretrained import base_folder, lazy_tensors, read_model
from gac.models.sampling_mode import sampling_mode
from gac.models.source import (
    check_files,
    check_model,
    check_source,
    check_tokenizer,
    one_line_errors,
)
from gac.rollouts.generation import stop_tokens
from gac_kernels import LossSpec

TINY = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_a_head_and_its_logits_give_the_same_loss_and_logprobs() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator) for s in ((2, 3, 4), (7, 4), (7,)))
    plain = Head(hidden, weight.requires_grad_(), bias, scaling=(2.0, 3.0))
    logits = 3 * torch.tanh(2 * (hidden @ weight.T + bias) / 3)
    assert torch.equal(logits, plain.scaled(hidden @ weight.T + bias))
    targets = torch.tensor([[1, 2, -100], [6, 0, 3]])
    batch = (targets, torch.tensor([1.0, -0.5]), torch.tensor([False, True]))
    full = Head(None, logits=logits)
    torch.testing.assert_close(
        full.logprobs(targets, temperature=0.7), plain.logprobs(targets, temperature=0.7)
    )
    assert torch.equal(full.logprobs(targets)[0], full.logprobs(targets, temperature=1.0)[0])
    spec = LossSpec(temperature=0.7)
    torch.testing.assert_close(*(h.loss(*batch, mu=0.5, spec=spec).loss for h in (full, plain)))
    read = lambda *_, **__: torch.get_autocast_dtype("cpu")  # noqa: E731 - one line
    assert Head(hidden, weight, autocast=torch.float16)._linear(read, targets) == torch.float16


def test_the_gradient_of_logits_takes_their_place() -> None:
    logits = torch.randn(1, 2, 7, requires_grad=True) * 1  # not a leaf
    before = logits.detach().clone()
    Head(None, logits=logits).loss(
        torch.tensor([[1, 2]]), torch.tensor([1.0]), torch.tensor([True]), mu=0.5
    ).loss.backward()
    assert not torch.equal(logits, before)


@pytest.mark.parametrize("plain", [True, False])
def test_the_forward_of_a_loss_keeps_no_cache(plain) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY))
    assert head.attach_head(model)
    model.__dict__["plain_head"] = plain
    used: list = []
    model.model.register_forward_hook(lambda *a: used.append(a[-1].past_key_values))
    ids = torch.tensor([[3, 4]])
    parts = head.run_head(model, input_ids=ids)
    assert (parts.hidden is None, parts.logits is None) == (not plain, plain)
    assert used == [None]
    assert model(input_ids=ids).past_key_values is not None


def test_other_errors_of_the_check_are_explained() -> None:
    class Model(torch.nn.Linear):
        config = SimpleNamespace(model_type="fake")

        def forward(self, input_ids, use_cache):
            raise TypeError("needs\n pixels")

    model = Model(1, 1)
    model.__dict__["plain_head"] = True
    with pytest.raises(
        ConfigError, match=r"'fake' does not work as a causal .* \(TypeError: needs pixels\)"
    ):
        head.check_head(model)


class Leaky(torch.nn.Linear):
    """The logits of its third token depend on the fourth."""

    config = SimpleNamespace(model_type="fake")
    dtype = property(lambda self: self.weight.dtype)

    def forward(self, input_ids, until_head=False, **_):
        leak = self.leak * float(input_ids[0, -1]) / 3
        logits = self.size * torch.tensor([[[-1.0, 0.5], [0.5, 0.5], [0.5, leak], [99, leak]]])
        return (logits, None, None) if until_head else SimpleNamespace(logits=logits)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("masters", [False, True])
def test_what_exceeds_the_rounding_of_a_dtype_is_not_causal(dtype, rounding, masters) -> None:
    model = Leaky(1, 1, dtype=torch.float32 if masters else dtype)
    model.__dict__["plain_head"] = True
    if masters:
        precision.set_compute_dtype(model, dtype, by_autocast=False)
    for model.leak, model.size in ((0.9 * rounding, 8.0), (0.0, 0.0)):
        assert not head.check_head(model)
    model.leak, model.size = 1.1 * rounding, 8.0
    with pytest.raises(ConfigError, match="model type 'fake' is an encoder"):
        head.check_head(model)


def test_the_mask_of_a_model_replaces_the_row_bounds() -> None:
    x = torch.randn(3, 1, 1, 4, 2)
    itself = torch.eye(4).bool()[None, None]
    attended, _ = row_attention._attention(
        SimpleNamespace(is_causal=True), *x, itself, torch.tensor([0, 2, 4])
    )
    torch.testing.assert_close(attended, x[2].transpose(1, 2))


def test_the_base_of_adapters(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert base_folder(str(tmp_path)) == str(tmp_path)
    for base, expected in (("other", "other"), (None, str(tmp_path))):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        assert base_folder(str(tmp_path)) == expected
    assert base_folder("owner/not-in-the-cache") == "owner/not-in-the-cache"


def test_initial_weights_depend_only_on_the_seed(tmp_path, caplog) -> None:
    AutoConfig.for_model("qwen2", **TINY).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), random_init=True, dtype="bfloat16")
    first, same, other = (load_model(config, *seed) for seed in ((), (0,), (1,)))
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight.dtype == precision.compute_dtype(first) == torch.bfloat16
    assert not any(module.training for module in first.modules())
    adapted = make_model(replace(config, lora=LoraConfig()), 0, training=True)
    assert {parameter.requires_grad: parameter.dtype for parameter in adapted.parameters()} == {
        True: torch.float32,
        False: torch.bfloat16,
    }
    kept = load_model(replace(config, keep_dropout=True, attention="eager"))
    assert all(module.training for module in kept.modules())
    assert kept.config._attn_implementation == "eager"
    assert "model.keep_dropout" not in caplog.text  # there is none in its configuration
    meta = load_meta_model(config)
    assert {(p.dtype, p.device.type) for p in meta.parameters()} == {(torch.bfloat16, "meta")}
    assert meta.config.name_or_path == str(tmp_path)


def test_the_head_is_checked_when_a_model_is_loaded(tmp_path) -> None:
    AutoConfig.for_model("bert", **TINY).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model type 'bert' is an encoder"):
        load_model(ModelConfig(path=str(tmp_path), random_init=True))


def test_weights_in_one_file_are_read_lazily(tmp_path, monkeypatch) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY))
    path = str(tmp_path)
    model.config.save_pretrained(path)
    assert lazy_tensors("model.path", path) is None
    model.save_pretrained(path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7}')
    expected = load_file(tmp_path / "model.safetensors")
    assert {name: x[...].tolist() for name, x in lazy_tensors("model.path", path).items()} == {
        name: x.tolist() for name, x in expected.items()
    }
    for lazily in (True, False):
        loaded = read_model("model.path", path, lazily, dtype=torch.bfloat16)
        assert loaded.config.name_or_path == path
        assert loaded.dtype == torch.bfloat16
        assert loaded.generation_config.temperature == 0.7
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    (tmp_path / "adapter_config.json").write_text("{}")
    assert lazy_tensors("model.path", path) is None
    (tmp_path / "adapter_config.json").unlink()
    loading, ended = ExitStack(), []
    loading.callback(ended.append, True)
    sharded = make_model(ModelConfig(path=path, dtype="bfloat16"), 0, loading, training=True)
    assert ended
    assert (sharded.dtype, precision.compute_dtype(sharded)) == (torch.float32, torch.bfloat16)
    assert sharded.__dict__["autocast"] is None  # the sharding casts the weights
    monkeypatch.setattr("gac.models.pretrained.lazy_tensors", None)  # not called
    read_model("model.path", path, False)


def test_only_causal_models_are_trained(tmp_path) -> None:
    with pytest.raises(ValueError, match="dtype='float16': use one of float32, bfloat16"):
        ModelConfig(dtype="float16")
    with pytest.raises(ConfigError, match="model.path is empty"):
        load_model(ModelConfig())
    with pytest.raises(
        ConfigError, match=r"the folder has no model \(config.json\): give a folder"
    ):
        load_model(ModelConfig(path=str(tmp_path)))
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model type 't5' is not a causal language model"):
        _training_config(ModelConfig(path=str(tmp_path)))
    AutoConfig.for_model(
        "llama", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    ).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"quantized \(bitsandbytes\), and QLoRA is not supported"
    ):
        _training_config(ModelConfig(path=str(tmp_path)))


def test_padding_uses_the_eos_token_only_if_there_is_no_other(tmp_path) -> None:
    for name, pad, stops in (("with", True, [7, 6]), ("without", False, 6)):
        words = make_tokenizer()
        words.pad_token = words.convert_ids_to_tokens(5) if pad else None
        words.save_pretrained(tmp_path / name)
        GenerationConfig(eos_token_id=stops).save_pretrained(tmp_path / name)
        (tmp_path / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": str(tmp_path / name)})
        )
        for path in (tmp_path / name, tmp_path):  # the model, and adapters of it
            loaded = load_tokenizer(ModelConfig(path=str(path), tokenizer=str(tmp_path / name)))
            assert loaded.model_stops == [loaded.eos_token_id, *([7] if pad else []), 6]
            assert loaded.pad_token_id == (5 if pad else loaded.eos_token_id)
            assert loaded.eos_token_id != 5
    words.eos_token = None
    words.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^model.tokenizer='.*': the tokenizer has no EOS token"):
        load_tokenizer(ModelConfig(path="other", tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model.path='.*' cannot be loaded: Expecting"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (
            source.WEIGHTS,
            """model.safetensors model-00001-of-00002.safetensors pytorch_model.bin
            pytorch_model-00001-of-00002.bin adapter_model.safetensors""",
        ),
        (
            source.TOKENIZERS,
            "tokenizer.json tokenizer_config.json vocab.txt merged_vocab.json sp.model source.spm "
            "tekken.json",
        ),
    ],
)
def test_files_of_every_kind_are_recognized(tmp_path, patterns, names) -> None:
    check_files("key", "owner/name", "part", "add it", *patterns)  # a name on the Hub
    for name in names.split():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / "other.json").touch()
        with pytest.raises(
            ConfigError, match=rf"^key='.*': the folder has no part \({patterns[0]}\): add it$"
        ):
            check_files("key", str(folder), "part", "add it", *patterns)
        (folder / name).touch()
        check_files("key", str(folder), "part", "add it", *patterns)


def test_dora_adapters_are_refused_by_name(tmp_path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"use_dora": True}))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"DoRA adapters \(use_dora=true\).*merge_and_unload"):
        check_model(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize("name", ["./no", "../no", "~/no", "/no", "a/b/c"])
def test_paths_are_not_looked_up_on_the_hub(name, monkeypatch) -> None:
    monkeypatch.setattr(source, "_check_hub", lambda *_: None)
    with pytest.raises(ConfigError, match=f"model.path='{name}': no such folder"):
        check_source("model.path", name)
    check_source("model.path", "owner/name")
    monkeypatch.setattr(source, "_check_hub", None)  # not called
    config = ModelConfig(path="owner/name")
    check_model(config, ask_hub=False)
    assert check_tokenizer(config, ask_hub=False) == ("model.path", "owner/name")
    assert (own := ModelConfig("~/x", "~/x")).path == own.tokenizer == str(Path.home() / "x")
    assert ModelConfig("./x").path == "./x"
    assert ModelConfig("~none/x").path == "~none/x"


def test_names_that_the_hub_rejects() -> None:
    with pytest.raises(ConfigError, match="and 'owner/a--b' is not a valid Hub name"):
        check_source("model.path", "owner/a--b")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", None])
def test_cached_models_need_no_hub(name, monkeypatch) -> None:
    """The cache also remembers which files a model lacks."""

    def cached(_, file):
        return "path" if file == name else huggingface_hub._CACHED_NO_EXIST

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with nullcontext() if name else pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
        check_source("model.path", "owner/name")
    for load in (load_model, load_tokenizer) if name is None else ():
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
            load(ModelConfig(path="owner/name"))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError(), "cannot be loaded: KeyError"),
        (OSError("no\n file. Try another."), "cannot be loaded: no file."),
        (ValueError("x" * 400), f"cannot be loaded: {'x' * 300}"),
        (ConfigError("a. b"), None),
        (RuntimeError("a. b"), None),
        *(
            (kind("a. b"), "cannot be loaded: a.")
            for kind in (ImportError, AttributeError, TypeError)
        ),
    ],
)
def test_loading_errors_of_transformers_become_one_line(error, text) -> None:
    with (
        pytest.raises(ConfigError if text else type(error)) as raised,
        one_line_errors("model.path", "x"),
    ):
        raise error
    assert str(raised.value) == (f"model.path='x' {text}" if text else "a. b")


def test_row_attention_is_restored_after_a_plain_block() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY))
    model.config.layer_types = ["full_attention", "sliding_attention"]
    for enabled in (False, True):
        assert not enabled or row_attention.enable_row_attention(model)
        before = model.config._attn_implementation
        with row_attention.without_row_attention(model):
            assert model.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == before
        assert (before == row_attention.ROW_ATTENTION) == enabled
        assert row_attention.attends_by_row(model) == enabled
        assert row_attention.disable_row_attention(model) == enabled
    model.train().lm_head.eval()
    with sampling_mode(model):
        assert not any(module.training for module in model.modules())
    assert model.training
    assert not model.lm_head.training
    model.config._attn_implementation = "flash_attention_2"
    assert row_attention.attends_by_row(model)


def test_errors_in_a_forward_leave_no_traces() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY))
    assert head.attach_head(model)
    assert row_attention.enable_row_attention(model)
    ids, bounds = torch.tensor([[TINY["vocab_size"]]]), torch.tensor([0, 1])
    with pytest.raises(IndexError):
        head.run_head(model, input_ids=ids, cu_seq_lens_q=bounds, attention_mask=None)
    with pytest.raises(KeyError), row_attention.without_row_attention(model):
        raise KeyError
    assert model.config._attn_implementation == row_attention.ROW_ATTENTION
    assert not head._recording.get()
    assert not row_attention._unmasked.get()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("attention_chunk_size", 4),
        ("_attn_implementation", "eager"),
        ("_attn_implementation", row_attention.ROW_ATTENTION),
        ("ALL_ATTENTION_FUNCTIONS", None),  # a name in the module of the model
    ],
)
def test_row_attention_is_not_enabled_for_other_kinds_of_attention(
    name, value, monkeypatch
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY))
    setattr(model.config, name, value)
    monkeypatch.delattr(sys.modules[type(model).__module__], name, raising=False)
    before = model.config._attn_implementation
    assert not row_attention.enable_row_attention(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",), r".*\.v_proj"])
def test_adapters_have_the_options_of_the_configuration(targets) -> None:
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY))
    layer = model.model.layers[0]
    layer.mlp.gate_proj = type("ARouter", (torch.nn.Linear,), {})(16, 16)
    options = apply_training_options(
        model, ModelConfig(lora=LoraConfig(rank=3, alpha=5, dropout=0.25, target_modules=targets))
    ).peft_config["default"]
    assert (options.r, options.lora_alpha, options.lora_dropout) == (3, 5, 0.25)
    assert options.task_type == "CAUSAL_LM"
    assert {n for n in ("gate_proj", "up_proj") if hasattr(getattr(layer.mlp, n), "lora_A")} == (
        {"up_proj"} if targets == "all-linear" else set()
    )
    attention = {n for n in ("q_proj", "v_proj") if hasattr(getattr(layer.self_attn, n), "lora_A")}
    assert attention == {"all-linear": {"q_proj", "v_proj"}, ("q_proj",): {"q_proj"}}.get(
        targets, {"v_proj"}
    )


def test_adapters_of_unknown_modules() -> None:
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY))
    names = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    message = rf"model.lora.target_modules=\['x'\]: Target .*; use all-linear, or some of {names}$"
    with pytest.raises(ConfigError, match=message):
        apply_training_options(model, ModelConfig(lora=LoraConfig(target_modules=("x",))))


@pytest.mark.parametrize(
    ("option", "wrong", "right"),
    [
        ("target_modules", (), ("q_proj",)),
        ("target_modules", (), None),
        ("target_modules", "", "q"),
        ("dropout", 1.0, 0.99),
        ("dropout", -0.1, 0.0),
        ("rank", 0, 1),
        ("alpha", 0, 1),
    ],
)
def test_options_of_adapters_are_checked(option, wrong, right) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={wrong!r}: use")):
        LoraConfig(**{option: wrong})
    assert getattr(LoraConfig(**{option: right}), option) == right


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_only_the_dropout_of_adapters_stays_in_training_mode(dropout, caplog) -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.RReLU(), torch.nn.RReLU()).train()
    model[2].gradient_checkpointing = True  # works in training mode only
    _disable_noise(model, LoraConfig(dropout=dropout))
    assert [module.training for module in model] == [dropout > 0, False, True]
    assert ("sampling has no dropout" in caplog.text) == (dropout > 0)


@pytest.mark.parametrize("keep", [False, True])
def test_dropout_is_removed_unless_requested(tmp_path, keep, caplog) -> None:
    AutoConfig.for_model(
        "gpt2",
        resid_pdrop=0.25,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "summary_first_dropout"), 0.0),
    ).save_pretrained(tmp_path)
    config = _training_config(ModelConfig(path=str(tmp_path), keep_dropout=keep))
    assert (config.resid_pdrop, config.attn_pdrop) == (0.25 if keep else 0.0, 0.0)
    assert caplog.text.count("training uses resid_pdrop=0.25, but sampling") == keep


def test_every_kind_of_dropout_is_removed(tmp_path) -> None:
    noise = {"layerdrop": 0.5, "dropout": 0.25, "attention_dropout": 0.125}
    AutoConfig.for_model("opt", **noise).save_pretrained(tmp_path)
    config = _training_config(ModelConfig(path=str(tmp_path)))
    assert [getattr(config, name) for name in noise] == [0.0] * 3


def test_dropout_and_router_losses_of_a_part_are_removed(tmp_path, caplog) -> None:
    """A model of text and images has a configuration for each."""
    config = AutoConfig.for_model("gemma3", text_config={"attention_dropout": 0.5, **TINY})
    config.text_config.output_router_logits = True
    config.save_pretrained(tmp_path)
    text = _training_config(ModelConfig(path=str(tmp_path))).text_config
    assert (text.attention_dropout, text.output_router_logits) == (0.0, False)
    assert caplog.text.count("output_router_logits is set") == 1


def test_stop_strings_are_one_token() -> None:
    words = make_tokenizer()
    assert stop_tokens(words, ("2", "0")) == [words.eos_token_id, 5, 3]
    words.add_special_tokens({"bos_token": "<s>"})
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words.bos_token_id)]
    )  # every text
    words.chat_template = "{% for m in messages %}{{ m.content }}é1<pad>{% endfor %}"
    assert stop_tokens(words, ("2", "0")) == [words.eos_token_id, words.pad_token_id, 5, 3]
    with pytest.raises(ConfigError, match="stop='20' is 2 tokens"):
        stop_tokens(words, ("2", "20"))


def test_the_head_multiplies_contiguous_rows_in_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slice of the prompt's hidden states, oneDNN's bfloat16 product is 300 times slower."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY)).save_pretrained(
        tmp_path
    )
    model = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"))
    head_module, inputs = model.get_output_embeddings(), []
    linear = torch.nn.functional.linear

    def recorded(hidden: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        if weight is head_module.weight:
            inputs.append(hidden)
        return linear(hidden, weight, *bias)

    monkeypatch.setattr(torch.nn.functional, "linear", recorded)
    model(torch.zeros(3, 5, dtype=torch.long), logits_to_keep=1)
    assert [x.shape for x in inputs] == [(3, 1, 16)]
    assert inputs[0].is_contiguous()
