"""An export equals what transformers saves for the full model, in files of bounded size."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from gac.demo.task import tokenizer
from gac.faults import checkpoint
from gac.models.causal_lm import LoraConfig, ModelConfig, make_model
from gac.training.export import export_checkpoint

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def trained(folder, kind, config: ModelConfig, **changes):
    """Save a checkpoint of a model with random values in every parameter; return the path and the
    model.
    """
    made = AutoConfig.for_model(kind, **SMALL, **changes)
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = make_model(config, seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 10)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return checkpoint.save(folder / "run", 1, model, optimizer, {}), model


def tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("kind", "changes", "dtype"),
    [
        pytest.param("qwen2", {"tie_word_embeddings": True}, "bfloat16", id="tied"),
        pytest.param("llama", {"tie_word_embeddings": False}, "float32", id="untied"),
        pytest.param("qwen3_moe", EXPERTS, "float32", id="experts-saved-separately"),
    ],
)
@pytest.mark.parametrize("shard", [1 << 30, 1])
def test_an_export_is_that_of_the_whole_model(tmp_path, kind, changes, dtype, shard):
    config = ModelConfig(path=str(tmp_path / "base"), dtype=dtype, random_init=True)
    path, model = trained(tmp_path / "base", kind, config, **changes)
    model.__dict__.pop("forward")
    model.save_pretrained(tmp_path / "whole")
    export_checkpoint(config, path, tmp_path / "out", shard)
    written, wanted = tensors(tmp_path / "out"), tensors(tmp_path / "whole")
    assert written.keys() == wanted.keys()
    assert all(x.dtype == wanted[n].dtype and torch.equal(x, wanted[n]) for n, x in written.items())
    for name in ("config.json", "generation_config.json"):
        both = [json.loads((tmp_path / f / name).read_text()) for f in ("out", "whole")]
        assert both[0] == both[1]
    names = {file.name for file in (tmp_path / "out").iterdir()}
    if shard == 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == wanted.keys()
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in wanted.values())
        assert {n for n in names if "safetensors" in n} == {
            *index["weight_map"].values(),
            "model.safetensors.index.json",
        }
        layers = 2 + len({n for n in wanted if "layers." not in n})  # one file each
        assert len(set(index["weight_map"].values())) == layers
    else:
        assert [n for n in names if "safetensors" in n] == ["model.safetensors"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=model.dtype).state_dict()
    assert all(torch.equal(x, again[n]) for n, x in model.state_dict().items())


def test_adapters_are_merged_layer_by_layer(tmp_path):
    pytest.importorskip("peft", reason="needs the extra `lora`")
    targets = ("q_proj", "down_proj", "lm_head")
    config = ModelConfig(
        path=str(tmp_path / "base"), random_init=True, lora=LoraConfig(rank=4, targets=targets)
    )
    path, model = trained(tmp_path / "base", "llama", config, tie_word_embeddings=False)
    export_checkpoint(config, path, tmp_path / "out", 1)
    written, wanted = tensors(tmp_path / "out"), model.merge_and_unload().state_dict()
    assert written.keys() == wanted.keys()
    assert all(torch.equal(x, wanted[name]) for name, x in written.items())
