"""An export, a server, a resumed run, peft's merge and peft's loading compute the trained model.

For every family of models, with the embedding and the LM head tied, and each choice of adapters.
"""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gac.demo.task import make_tokenizer
from gac.errors import ConfigError
from gac.faults import checkpoint
from gac.models import adapters
from gac.models.causal_lm import make_model
from gac.models.config import LoraConfig, ModelConfig
from gac.models.pretrained import read_model
from gac.rollouts.vllm import Weights
from gac.training.export import export_checkpoint
from tools.models_table import RESULTS
from tools.tiny_models import tiny_config

peft = pytest.importorskip("peft", reason="needs the extra `lora`")
SLOW = ("phi4_multimodal",)  # its encoders, which text does not use, take minutes to build
FAMILIES = [
    name
    for name, modes in json.loads(RESULTS.read_text()).items()
    if "padded" in modes and name not in SLOW
]
ATTENTION = r".*(attn|attention|mixer|mamba|conv|rwkv|recurrent|hyena).*"
CHOICES = ("all weights", "all-linear", "attention", "mlp", "head", "embedding", "both")
# peft 0.21 does not find its own names of the adapters on shared experts when it loads them
RENAMED_BY_PEFT = ("laguna", "inkling2_text")
# transformers 5.23 sets the padding token's row to 0 when it loads the family
PADDING_LOST = ("youtu", "all weights", "export")
TOLERANCE = 1e-4  # nats
FULL = pytest.mark.full(reason="about 160 families")
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [20, 3, 17, 4, 33, 31, 30, 29]])
QUICK = [
    *(("llama", choice) for choice in CHOICES),
    ("gpt2", "both"),  # its layers multiply by the transposed weight
    ("gemma2", "embedding"),  # scales its embedding
    ("qwen3_moe", "all-linear"),  # adapters on the parameters of a stack of experts
]


@torch.no_grad()
def logps(model):
    return model.eval()(input_ids=TOKENS, use_cache=False).logits.double().log_softmax(-1)


def save_base(family, folder, *, tied=True):
    """Save a tiny random model that is far from uniform, and its tokenizer."""
    config = tiny_config(family)
    for part in (config, config.get_text_config(decoder=True)):
        part.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    perturb(model.parameters(), 0.1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


@torch.no_grad()
def perturb(parameters, scale):
    generator = torch.Generator().manual_seed(1)
    for p in parameters:
        p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * scale)


def targets(choice, model):
    """The value of `model.lora.target_modules`, or None for training without adapters."""
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [
        name
        for module, name in names.items()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    inside = [name for name in layers if re.fullmatch(ATTENTION, name)]
    return {
        "all weights": None,
        "all-linear": "all-linear",
        "attention": pattern(inside),
        "mlp": pattern([name for name in layers if name not in inside]),
        "head": pattern([names[head]]),
        "embedding": pattern([names[embedding]]),
        "both": pattern([names[embedding], names[head]]),
    }[choice]


def pattern(names):
    """A regular expression for these names alone; a list would also match their last parts."""
    return "|".join(map(re.escape, names))


def trained(config, folder):
    """A model whose trainable weights have changed, and its checkpoint."""
    model = make_model(config, seed=0, training=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    perturb(trainable, 0.1)
    return model, checkpoint.save(folder, 1, model, torch.optim.AdamW(trainable), {})


def merged_by_peft(model):
    """A copy; the patched forward does not survive a copy."""
    forward = model.get_base_model().__dict__.pop("forward")
    merged = copy.deepcopy(model).merge_and_unload()
    model.get_base_model().__dict__["forward"] = forward
    return merged


def consumers(model, config, path, folder):
    """The models that compute with what was trained, by the way that the weights took."""
    export_checkpoint(config, path, folder / "out")
    yield "export", AutoModelForCausalLM.from_pretrained(folder / "out")
    resumed = make_model(config, seed=5, training=True)
    checkpoint.load_weights(path, resumed)
    yield "resumed", resumed
    server = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "out"))
    expected = dict(server.named_parameters())
    received = dict(Weights(model))
    assert received.keys() == expected.keys()
    server.load_state_dict(received, strict=False)
    yield "server", server
    if config.lora is not None:
        yield "peft's merge", merged_by_peft(model)
        export_checkpoint(config, path, folder / "adapters", adapters=True)
        base = AutoModelForCausalLM.from_pretrained(config.path)
        yield "peft's loading", peft.PeftModel.from_pretrained(base, folder / "adapters")


@pytest.mark.parametrize(
    ("family", "choice"),
    [
        *QUICK,
        *(
            pytest.param(family, choice, marks=FULL)
            for family in FAMILIES
            for choice in CHOICES
            if (family, choice) not in QUICK
        ),
    ],
)
def test_every_consumer_computes_what_was_trained(tmp_path, family, choice):
    base = save_base(family, tmp_path / "base")
    modules = targets(choice, base)
    if modules == "":
        pytest.skip(f"{family} has no linear layers of this kind")
    lora = None if modules is None else LoraConfig(rank=2, target_modules=modules)
    config = ModelConfig(path=str(tmp_path / "base"), lora=lora)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    try:
        model, path = trained(config, tmp_path / "run")
    except ConfigError as error:  # refused before training
        assert str(error).startswith(("model.lora.target_modules", "model.path"))
        return
    expected = logps(model)
    assert (logps(base) - expected).abs().max() > 100 * TOLERANCE
    for name, consumer in consumers(model, config, path, tmp_path):
        renamed = name == "peft's loading" and family in RENAMED_BY_PEFT
        if not renamed and (family, choice, name) != PADDING_LOST:
            assert (logps(consumer) - expected).abs().max() < TOLERANCE, name
    adapted = choice in ("head", "embedding", "both")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    if tied and adapted:
        assert exported["tie_word_embeddings"] is False
        with pytest.raises(ConfigError, match=r"^rollouts.engine='vllm': .*model.lora.target_mod"):
            adapters.check_server(model)
    else:
        adapters.check_server(model)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("choice", ["all weights", "all-linear", "head"])
def test_a_checkpoint_with_both_matrices_of_a_tied_model(tmp_path, equal, choice):
    """transformers does not tie them if they differ, whatever the configuration says."""
    base = save_base("llama", tmp_path / "base", tied=False)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    if equal:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    modules = targets(choice, base)
    lora = None if modules is None else LoraConfig(rank=2, target_modules=modules)
    config = ModelConfig(path=str(tmp_path / "base"), lora=lora)
    for lazily in (False, True):  # as for a sharded model
        loaded = read_model("model.path", config.path, lazily, dtype=torch.float32)
        assert adapters.is_untied(loaded) is not equal
        assert torch.equal(logps(loaded), logps(AutoModelForCausalLM.from_pretrained(config.path)))
    model, path = trained(config, tmp_path / "run")
    expected = logps(model)
    for name, consumer in consumers(model, config, path, tmp_path):
        assert (logps(consumer) - expected).abs().max() < TOLERANCE, name
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["tie_word_embeddings"] is (equal and choice != "head")


@pytest.mark.parametrize(
    ("family", "choice", "reason"),
    [
        ("xmod", "head", "tie_word_embeddings also ties lm_head.decoder.bias"),
        (
            "inkling_text",
            "embedding",
            r"embed_tokens \(InklingNormedEmbedding\) computes something",
        ),
        ("zamba", "all-linear", r"layers.5.* shares its weight with .*layers.1"),
    ],
)
def test_what_no_plain_model_can_compute_is_refused(tmp_path, family, choice, reason):
    base = save_base(family, tmp_path)
    lora = LoraConfig(rank=2, target_modules=targets(choice, base))
    with pytest.raises(ConfigError, match=rf"^model.lora.target_modules: .*{reason}.*: name other"):
        make_model(ModelConfig(path=str(tmp_path), lora=lora), seed=0)


class SharedLayers(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.embed = torch.nn.Embedding(2, 2)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return None


def test_an_adapter_on_a_weight_of_other_modules_is_refused():
    model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["first"]), SharedLayers())
    with pytest.raises(
        ConfigError,
        match=r"^model.lora.target_modules: first shares .* with second,",
    ):
        adapters.untie_adapted(model)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"target_modules": ["q_proj"]}, id="attention"),
        pytest.param({"target_modules": ["q_proj"], "use_rslora": True}, id="rslora"),
        pytest.param({"target_modules": ["lm_head", "embed_tokens"]}, id="tied"),
        pytest.param({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, id="saved"),
    ],
)
def test_saved_adapters_are_trained_further(tmp_path, options):
    """`model.path` is a folder of adapters that peft has written."""
    base = save_base("llama", tmp_path / "base")
    base.config.name_or_path = str(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    perturb([p for p in model.parameters() if p.requires_grad], 0.2)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "start")
    make_tokenizer().save_pretrained(tmp_path / "start")
    config = ModelConfig(path=str(tmp_path / "start"))
    before = logps(make_model(config, seed=0, training=True))
    assert (before - logps(model)).abs().max() < TOLERANCE
    model, path = trained(config, tmp_path / "run")
    expected = logps(model)
    assert (before - expected).abs().max() > 100 * TOLERANCE
    export_checkpoint(config, path, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "out")
    assert (logps(loaded) - expected).abs().max() < TOLERANCE
    with pytest.raises(ConfigError, match=r"^model.lora: .*already contains adapters.*remove"):
        make_model(ModelConfig(path=str(tmp_path / "start"), lora=LoraConfig()), seed=0)
    if "modules_to_save" in options:
        with pytest.raises(ConfigError, match=r"^rollouts.engine='vllm': .*lm_head"):
            adapters.check_server(model)
