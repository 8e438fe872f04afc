"""`gac export --gguf`: the file has the model and the tokenizer, as transformers reads them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gac.errors import ConfigError, MissingExtra
from gac.training.export import export_run
from gac.training.trainer import train
from tests.tiny import SMALL, tiny_config, write_bpe_model

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")

from gac.models import gguf_file  # noqa: E402 - it imports gguf

TEXTS = ["We sold 12 + 7 tickets.", "How many is that?\n\n<end>", "Naïve  日本"]
QUESTION = "A shop sold 12 lamps and 7 chairs. How many things did it sell?"
IDS = torch.arange(3, 60).view(3, 19)


def write_model(folder: Path, kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Write a random model and a tokenizer that are smaller than any of llama.cpp's own."""
    write_bpe_model(folder, TEXTS * 3)
    # not `AutoTokenizer`, which makes it a tokenizer of the Qwen2 configuration in the folder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<end>"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    # a head of odd size, beyond the tokenizer, and a bias that is not zero
    sizes = SMALL | {
        "vocab_size": len(tokenizer) + 3,
        "hidden_size": 48,
        "tie_word_embeddings": True,
    }
    config = AutoConfig.for_model(kind, **(sizes | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 10)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "dtype", "changes"),
    [
        pytest.param("llama", torch.float32, {}, id="llama"),
        pytest.param("llama", torch.bfloat16, {"tie_word_embeddings": False}, id="untied-bfloat16"),
        pytest.param("llama", torch.float16, {"head_dim": 6}, id="head-size-float16"),
        # of these two, transformers does not read the size of a head
        pytest.param("qwen2", torch.float32, {"head_dim": 12}, id="qwen2-biases"),
        pytest.param("qwen3", torch.float32, {"head_dim": 128, "rope_theta": 5e4}, id="qwen3"),
    ],
)
def test_transformers_reads_the_same_model(
    tmp_path: Path, kind: str, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model", kind, dtype, **changes)
    gguf_file.write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    ours, theirs = model.float().state_dict(), read.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    with torch.no_grad():
        torch.testing.assert_close(read(IDS).logits, model(IDS).logits)


def test_the_tokenizer_and_its_template(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama", torch.float32)
    gguf_file.write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in [*TEXTS, "a<eos>b <end>"]:
        assert theirs(text)["input_ids"] == ours(text)["input_ids"]
    assert theirs.chat_template == ours.chat_template
    assert (theirs.eos_token, theirs.pad_token) == ("<eos>", "<pad>")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == model.config.vocab_size
    assert fields["tokenizer.ggml.token_type"].contents()[-3:] == [gguf.TokenType.UNUSED] * 3


def test_export(tmp_path: Path, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "base", "llama", torch.float32)
    run = train(
        tiny_config(task, tmp_path / "run", model={"path": str(tmp_path / "base")}, steps=1)
    )
    export_run(Path(run), tmp_path / "out", gguf=True)
    folder = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    file = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    with torch.no_grad():
        torch.testing.assert_close(file(IDS).logits, folder(IDS).logits)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    monkeypatch.delitem(__import__("sys").modules, "gac.models.gguf_file")
    with pytest.raises(MissingExtra, match=r"^gac export --gguf needs the extra gguf"):
        export_run(Path(run), tmp_path / "again", gguf=True)
    assert not (tmp_path / "again").exists()


def test_adapters_alone_are_no_model(tmp_path: Path, task: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra `lora`")
    write_model(tmp_path / "base", "llama", torch.float32)
    model = {"path": str(tmp_path / "base"), "lora": {"rank": 2}}
    run = Path(train(tiny_config(task, tmp_path / "run", model=model, steps=1)))
    with pytest.raises(ConfigError, match="--gguf: .* only adapters are exported"):
        export_run(run, tmp_path / "out", adapters=True, gguf=True)
    export_run(run, tmp_path / "out", gguf=True)  # merged
    assert (tmp_path / "out" / "model.gguf").exists()


def tokenizer_with(*steps: Any) -> SimpleNamespace:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    return SimpleNamespace(backend_tokenizer=backend)


def test_how_texts_are_split_into_words() -> None:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    regexes = {name: Regex(regex) for regex, name in gguf_file.SPLITS.items()}
    known = {
        "gpt-2": [plain],
        "smollm": [digits, plain],
        **{n: [pre_tokenizers.Split(r, "isolated"), after] for n, r in regexes.items()},
    }
    for name, steps in known.items():
        assert gguf_file.word_split(tokenizer_with(*steps)) == name
    unknown = [
        [pre_tokenizers.ByteLevel(add_prefix_space=True)],
        [pre_tokenizers.Digits(individual_digits=False), plain],
        [pre_tokenizers.Split(Regex(r"\\s+"), "isolated"), after],
        [pre_tokenizers.Split(regexes["qwen2"], "removed"), after],
        [pre_tokenizers.Metaspace()],
    ]
    for steps in unknown:
        assert gguf_file.word_split(tokenizer_with(*steps)) is None


def test_the_regular_expression_of_qwen2() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert gguf_file.SPLITS[PRETOKENIZE_REGEX] == "qwen2"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma2", {}, r"--gguf: models of type 'gemma2' cannot be written, only llama, qwen2"),
        ("llama", {"attention_bias": True}, r"llama models with attention_bias=True"),
        ("llama", {"hidden_act": "gelu"}, r"llama models with hidden_act='gelu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            r"llama models with rope_type='linear'",
        ),
    ],
)
def test_models_that_it_cannot_write(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    write_bpe_model(tmp_path, TEXTS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    config = AutoConfig.for_model(kind, **(SMALL | changes))
    with pytest.raises(ConfigError, match=message) as error:
        gguf_file.check_convertible(config, tokenizer)
    assert "convert_hf_to_gguf.py" in str(error.value)


def test_a_tokenizer_that_llama_cpp_has_no_name_for(tmp_path: Path) -> None:
    write_bpe_model(tmp_path, TEXTS)
    path = tmp_path / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(saved))
    config = AutoConfig.for_model("llama", **SMALL)
    with pytest.raises(ConfigError, match="--gguf: this tokenizer splits texts"):
        gguf_file.check_convertible(config, PreTrainedTokenizerFast.from_pretrained(tmp_path))


@pytest.mark.real
def test_the_pretrained_model(real_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    gguf_file.write_gguf(real_model, file)
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"  # as in the package's file
    ours = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    ids = AutoTokenizer.from_pretrained(real_model)(QUESTION, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits)


@pytest.mark.real
def test_llama_cpp_gives_the_same_answer(real_model: Path, tmp_path: Path) -> None:
    llama = pytest.importorskip("xllamacpp", reason="needs llama.cpp (pip install xllamacpp)")
    file = tmp_path / "model.gguf"
    gguf_file.write_gguf(real_model, file)
    parameters = llama.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_gpu_layers, parameters.warmup = 512, 0, False
    parameters.cpuparams.n_threads = 1
    server = llama.Server(parameters)
    chat = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16}
    answer = server.handle_chat_completions(chat)["choices"][0]["message"]["content"]
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    prompt = tokenizer.apply_chat_template(
        chat["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    ours = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == ours
    text = "We sold 1234 tickets, isn't it?\n\nNaïve 日本 <|im_end|>"
    request = Request(
        f"{server.listening_address}/tokenize",
        json.dumps({"content": text, "parse_special": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60) as reply:
        assert json.load(reply)["tokens"] == tokenizer(text)["input_ids"]
