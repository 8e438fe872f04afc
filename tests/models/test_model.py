"""The LM head of every supported model family: loss and gradients equal those from the logits."""

import contextlib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gac.errors import ConfigError
from gac.models import row_attention
from gac.models.causal_lm import _add_lora, apply_training_options
from gac.models.config import LoraConfig, ModelConfig
from gac.models.head import attach_head, check_head, run_head
from gac_kernels import reference
from tests.tiny import SMALL


def make(kind: str, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SMALL, **changes})
    ).eval()


def check(model, tolerance: float = 1e-5):
    """Assert that loss and gradients through `run_head` equal those from the model's own logits."""
    ids = torch.randint(3, 61, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    targets = torch.where(mask.bool(), ids, -100).roll(-1, 1)
    targets[:, -1] = -100
    batch = (targets, torch.tensor([1.0, -0.5, 0.0]), torch.tensor([False, False, True]))
    out = run_head(model, input_ids=ids, attention_mask=mask).loss(*batch, mu=0.5)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = reference.fused_gac_loss(
        model(input_ids=ids, attention_mask=mask).logits, *batch, mu=0.5
    )
    expected.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.logps, expected.logps, rtol=1e-4, atol=1e-5)
    expected_grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "gemma", "phi"])
@pytest.mark.parametrize("tied", [True, False])
def test_head_of_known_families(kind, tied):
    model = make(kind, tie_word_embeddings=tied)
    assert attach_head(model)
    check(model)


SCALED = {
    "gemma2": ({"query_pre_attn_scalar": 8, "final_logit_softcapping": 0.5}, (1.0, 0.5)),
    "llama": ({"final_logit_softcapping": 0.0}, (1.0, None)),
    "granite": ({"logits_scaling": 4.0}, (0.25, None)),
    "cohere": ({"logit_scale": 0.125}, (0.125, None)),
    "minicpm3": (
        {
            "dim_model_base": 8,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
        (1.0, None),
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_scale_and_softcap_are_recorded(kind):
    changes, scaling = SCALED[kind]
    model = make(kind, **changes)
    assert attach_head(model)
    assert run_head(model, input_ids=torch.tensor([[3, 4]])).scaling == scaling
    check(model)


def index(logits):
    _ = logits[..., 0]
    return logits


TRANSFORMS = {
    "clamped": lambda model, logits: logits.clamp(min=0),
    "capped twice": lambda model, logits: 2 * logits.tanh().tanh(),
    "padded": lambda model, logits: torch.nn.functional.pad(logits, (0, 1)),
    "read by later code": lambda model, logits: index(logits),
    "of two calls of the head": lambda model, logits: (
        logits + 0 * model.lm_head(torch.zeros(32)).sum()
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_unknown_transforms_of_the_logits_fall_back_to_them(transform, caplog, monkeypatch):
    model = make("qwen2")
    forward = type(model).forward

    def transformed(self, *args, **keywords):
        out = forward(self, *args, **keywords)
        out.logits = transform(self, out.logits)
        return out

    monkeypatch.setattr(type(model), "forward", transformed)
    assert not attach_head(model)
    assert not check_head(model)
    assert not model.plain_head
    assert "not a plain linear layer" in caplog.text
    check(model)


@pytest.mark.parametrize("kind", ["qwen2", "bert"])
def test_the_check_of_the_head_keeps_the_modes_of_modules(kind):
    model = make(kind, attention_dropout=0.5).train()
    [*model.children()][-1].eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ConfigError) if kind == "bert" else contextlib.nullcontext():
        attach_head(model)
    assert modes == [module.training for module in model.modules()]
    assert len({*modes}) == 2


def test_encoders_are_refused():
    with pytest.raises(ConfigError, match="model type 'bert' is an encoder"):
        attach_head(make("bert"))


def test_generate_still_works_after_attach():
    model = make("qwen2")
    before = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False)
    attach_head(model)
    assert torch.equal(
        before, model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False)
    )


def test_gradient_checkpointing_changes_nothing():
    model = make("qwen2")
    attach_head(model)
    model = apply_training_options(model, ModelConfig(gradient_checkpointing=True)).train()
    layer = model.model.layers[0]
    assert layer.gradient_checkpointing
    assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": False}
    check(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_adapters_only(checkpointing):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    model = make("qwen2")
    attach_head(model)
    model = apply_training_options(
        model, ModelConfig(lora=LoraConfig(rank=2), gradient_checkpointing=checkpointing)
    ).train()
    assert row_attention.enable_row_attention(model)
    check(model)
    names = [n for n, p in model.named_parameters() if p.grad is not None]
    assert names
    assert all("lora" in n for n in names)


def test_adapters_skip_the_layers_of_mamba_that_bypass_their_forward():
    """Its kernels read the weights of these layers directly."""
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "mamba", vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4
        )
    )
    model = _add_lora(model, LoraConfig(rank=2))
    assert {n.split(".")[-4] for n, p in model.named_parameters() if p.requires_grad} == {
        "in_proj",
        "x_proj",
    }
    base = model.unload()
    with pytest.raises(ConfigError, match="out_proj"):  # named targets are not skipped
        _add_lora(base, LoraConfig(target_modules=("in_proj", "out_proj")))
    # the slow path, too, reads this weight directly; so an adapter would act only after a merge
    config = ModelConfig(lora=LoraConfig(target_modules=("dt_proj",)))
    with pytest.raises(ConfigError, match=r"^model.lora.target_modules: .*dt_proj .*name other"):
        apply_training_options(base, config)
