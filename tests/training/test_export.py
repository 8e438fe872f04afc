"""An export equals what transformers saves for the full model, in files of bounded size, and a
killed export loses nothing.
"""

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants, hf_api
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from gac.demo.task import make_tokenizer
from gac.errors import ConfigError, RunError
from gac.faults import checkpoint
from gac.models.causal_lm import make_model
from gac.models.config import LoraConfig, ModelConfig
from gac.training import export
from gac.training.export import export_checkpoint, export_run
from gac.training.trainer import train
from tests import kills, ranks
from tests.tiny import SMALL, tiny_config

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def save_random_checkpoint(folder, kind, config: ModelConfig, **changes):
    """Save a checkpoint of a model with random weights; return its path and the model."""
    AutoConfig.for_model(kind, **SMALL, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    model = make_model(config, seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 10)
    return checkpoint.save(
        folder / "run",
        1,
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        {},
    ), model


def tensors(folder):
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


@pytest.mark.parametrize(
    ("kind", "changes", "dtype"),
    [
        pytest.param("qwen2", {"tie_word_embeddings": True}, "bfloat16", id="tied"),
        pytest.param("llama", {"tie_word_embeddings": False}, "float32", id="untied"),
        pytest.param("qwen3_moe", EXPERTS, "float32", id="experts-saved-separately"),
    ],
)
@pytest.mark.parametrize("file_size", [1 << 30, 1])
def test_an_export_equals_the_full_model(tmp_path, kind, changes, dtype, file_size):
    config = ModelConfig(path=str(tmp_path / "base"), dtype=dtype, random_init=True)
    path, model = save_random_checkpoint(tmp_path / "base", kind, config, **changes)
    model.__dict__.pop("forward")
    model.save_pretrained(tmp_path / "full")
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "old.safetensors").touch()  # of a killed export
    export_checkpoint(config, path, tmp_path / "out", file_size)
    exported, expected = tensors(tmp_path / "out"), tensors(tmp_path / "full")
    assert exported.keys() == expected.keys()
    assert not (tmp_path / "out" / "part").exists()
    assert all(x.dtype == expected[n].dtype for n, x in exported.items())
    assert all(torch.equal(x, expected[n]) for n, x in exported.items())
    for name in ("config.json", "generation_config.json"):
        texts = [(tmp_path / folder / name).read_text() for folder in ("out", "full")]
        assert json.loads(texts[0]) == json.loads(texts[1])
    files = {file.name for file in (tmp_path / "out").glob("*safetensors*")}
    if file_size == 1:
        index_name = "model.safetensors.index.json"
        text = (tmp_path / "out" / index_name).read_text()
        index = json.loads(text)
        assert text == json.dumps(index, indent=2) + "\n"
        assert [*index] == ["metadata", "weight_map"]
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())
        weight_files = set(index["weight_map"].values())
        assert files == {*weight_files, index_name}
        count = len(weight_files)
        assert weight_files == {
            f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
        }
        assert index["metadata"]["total_parameters"] == model.num_parameters()
        # one file for each layer and for each other weight
        assert len(weight_files) == 2 + len({n for n in expected if "layers." not in n})
    else:
        assert files == {"model.safetensors"}
        assert export.FILE_SIZE == 2**30
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=model.dtype).state_dict()
    assert all(torch.equal(x, loaded[n]) for n, x in model.state_dict().items())


def test_adapters_are_merged_layer_by_layer(tmp_path, monkeypatch, recwarn):
    peft = pytest.importorskip("peft", reason="needs the extra `lora`")
    config = ModelConfig(
        path=str(tmp_path / "base"),
        random_init=True,
        lora=LoraConfig(rank=4, target_modules=("q_proj", "down_proj", "lm_head")),
    )
    path, model = save_random_checkpoint(
        tmp_path / "base", "llama", config, tie_word_embeddings=False
    )

    def merge(own, unit, merge=export._merged):
        merged = merge(own, unit)
        assert all(x.is_meta for x in own.state_dict().values())  # only the result is in memory
        return merged

    monkeypatch.setattr(export, "_merged", merge)
    export_checkpoint(config, path, tmp_path / "out", 1)
    export_checkpoint(config, path, tmp_path / "adapters", adapters=True)
    assert not [warning for warning in recwarn if "embedding" in str(warning.message)]
    assert (
        json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
        == config.path
    )
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "base")),
        tmp_path / "adapters",
    ).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(torch.equal(loaded[name], p) for name, p in trained.items())
    exported, expected = tensors(tmp_path / "out"), model.merge_and_unload().state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in exported.items())


def test_adapters_of_a_saved_model_stay_adapters(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra `lora`")
    AutoConfig.for_model("llama", **SMALL).save_pretrained(tmp_path / "base")
    base = make_model(ModelConfig(path=str(tmp_path / "base"), random_init=True), seed=0)
    base.__dict__.pop("forward")
    base.save_pretrained(tmp_path / "base")
    peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    ).save_pretrained(tmp_path / "adapters")
    make_tokenizer().save_pretrained(tmp_path / "adapters")
    config = ModelConfig(path=str(tmp_path / "adapters"))
    model = make_model(config, seed=0)
    trained = {n: p for n, p in model.named_parameters() if "lora" in n}
    with torch.no_grad():
        for p in trained.values():
            p.add_(torch.randn_like(p))
    export_checkpoint(
        config,
        checkpoint.save(tmp_path / "run", 1, model, torch.optim.AdamW(trained.values()), {}),
        tmp_path / "out",
    )
    exported = tensors(tmp_path / "out")
    assert len(exported) == len(trained)
    saved = {name.replace(".default", ""): p for name, p in trained.items()}
    for name, x in exported.items():
        assert torch.equal(x, saved[name.removeprefix("base_model.model.")])


@pytest.fixture(scope="module")
def short(task, tmp_path_factory):
    """A run of two steps and its export."""
    return train(tiny_config(task, tmp_path_factory.mktemp("short"), steps=2, eval={}, export=True))


@pytest.mark.parametrize(
    ("event", "name", "complete"),
    [
        pytest.param("os.rename", ".model.previous", "model", id="before-the-renames"),
        pytest.param("os.rename", "/model", ".model.previous", id="between-the-renames"),
        pytest.param("os.remove", "model.safetensors", "model", id="during-the-deletion"),
    ],
)
def test_a_killed_export_loses_nothing(task, tmp_path, short, event, name, complete):
    """A run is continued, and killed while its new export replaces the old one."""
    long = tiny_config(task, shutil.copytree(short, tmp_path / "run"), eval={}, export=True)
    assert ranks.run(kills.at_event, long, event, name, ranks=1) == [None]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / complete)
    train(long)
    assert export_run(tmp_path / "run", tmp_path / "expected").name == "step-00000004"
    exported, expected = tensors(tmp_path / "run" / "model"), tensors(tmp_path / "expected")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in exported.items())
    assert not list((tmp_path / "run").glob(".model.*"))


def test_a_model_card_names_a_base_model_of_the_hub(task, tmp_path):
    config = tiny_config(task, tmp_path, model={"path": "me/base"})
    (tmp_path / "adapter_config.json").touch()
    export._write_card(config, 3, tmp_path)
    for line in ("base_model: me/base\n", "library_name: peft\n", "Trained by GAC with the m"):
        assert f"\n{line}" in (tmp_path / "README.md").read_text()


class Hub(BaseHTTPRequestHandler):
    """The requests of an upload: creation of a repository, how to send each file, the commit."""

    def do_POST(self):
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        url = "https://huggingface.co/me/model"
        answer = {"url": url, "commitUrl": url, "commitOid": "", "warnings": [], "errors": []}
        name = self.path
        if name.endswith("/preupload/main"):
            answer = {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(lines[0])["files"]
                ]
            }
        elif name.endswith("/commit/main"):
            for value in (json.loads(line)["value"] for line in lines):
                self.server.files[value.get("path")] = value.get("summary") or base64.b64decode(
                    value["content"]
                )
        elif name.endswith("/create"):
            self.server.created.append(json.loads(lines[0]))
        body = json.dumps(answer).encode()
        exists = name.endswith("/create") and self.server.created[1:]
        self.send_response(403 if self.server.refused in name else 409 if exists else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_an_export_is_uploaded_to_a_private_repository(short, tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.created, server.refused = {}, [], "nothing"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hf_api.api, "endpoint", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    export_run(short, tmp_path / "out", repository="me/model")
    assert server.created[0]["visibility"] == "private"
    assert server.files == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} | {
        None: "Export of gac"
    }
    # the base model is a folder of this machine
    parts = b"`, 2 steps", b"library_name: transformers", b"reinforcement-learning", b"base_model"
    assert [*map(server.files["README.md"].count, parts)] == [1, 1, 1, 0]
    with pytest.raises(ConfigError, match=r"^--push-to-hub a/b/c: .* use OWNER/NAME"):
        export_run(short, tmp_path / "none", repository="a/b/c")
    with pytest.raises(ConfigError, match=r"^--adapters: .* trained all weights"):
        export_run(short, tmp_path / "none", adapters=True)
    for refused, kind in (("/create", ConfigError), ("/commit", RunError)):
        server.refused, out = refused, tmp_path / refused[1:]
        with pytest.raises(kind, match=r"^--push-to-hub me/model: 403 Forbidden.*`hf "):
            export_run(short, out, repository="me/model")
        assert any(out.iterdir()) == (kind is RunError)
    server.shutdown()
    server.server_close()
