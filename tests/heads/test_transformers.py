"""`fuse(model)`: the same losses and gradients as transformers' own loss, without logits."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from gac_kernels import fused_gac_loss, token_logprobs
from gac_kernels.heads.transformers import LazyLogits, Record, fuse
from tests.ranks import run

V = 97
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 2.0, "tie_word_embeddings": True},  # logits reach 2
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {},  # a bias in the head
}


def make(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": V}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    values = {**sizes, **heads, **special, **FAMILIES[family], **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(10)  # confident predictions
        if head.bias is not None:
            head.bias.normal_()
    return model.train()


def batch(rows: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(3, V, (rows, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = labels[1, 4] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().float(), **{name: grad.clone() for name, grad in named.items()}}


def check(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        scale = tolerance * expected[name].abs().max().item()
        torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=scale)


@pytest.fixture
def no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a test computes logits."""
    monkeypatch.setattr(Record, "full", None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_logits")
def test_the_loss_and_its_gradients_are_those_of_the_model(family: str) -> None:
    model, inputs = make(family), batch()
    if family == "cohere":
        model.logit_scale = torch.tensor(0.3)
    shifted = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    elsewhere = mock.MagicMock(spec=Tensor, **{"to.return_value": torch.tensor(40)})
    variants: list[dict[str, Any]] = [{}, {"num_items_in_batch": elsewhere}]
    variants += [{"shift_labels": torch.where(shifted > V // 2, shifted, -100)}]
    if family == "llama":
        inputs["labels"] = inputs["labels"].clamp(min=0)
        variants += [{"ignore_index": 0}]
    for variant in variants:
        expected = gradients(model, **inputs, **variant)
        with fuse(model) as handle:
            assert fuse(model) is handle
            check(gradients(model, **inputs, **variant), expected)
            assert handle.reason is None
            assert handle.problem is None
        check(gradients(model, **inputs, **variant), expected, 0)


def lora(model: PreTrainedModel) -> nn.Module:
    targets = ["q_proj", "lm_head"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    return get_peft_model(model, config)


def checkpointed(model: PreTrainedModel) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def trained_head(model: PreTrainedModel) -> nn.Module:
    saved = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    return get_peft_model(model, LoraConfig(**saved, task_type="CAUSAL_LM"))


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "lora": lora,
    "trained head": trained_head,
    "checkpointing": checkpointed,
    "compile": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("first", ["fuse", "wrap"])
@pytest.mark.usefixtures("no_logits")
def test_inside_wrappers(wrapper: str, first: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds
        expected = gradients(WRAPPERS[wrapper](make("gemma2", num_hidden_layers=1)), **batch())
    model = make("gemma2", num_hidden_layers=1)
    if first == "fuse":
        fuse(model)
    wrapped = WRAPPERS[wrapper](model)
    with torch.no_grad():
        if wrapper in ("deepcopy", "pickle"):
            model.get_output_embeddings().weight.zero_()  # the copy has a head of its own
    if first == "wrap":
        fuse(wrapped)
    for again in (False, True):
        check(gradients(wrapped, **batch()), expected)
        # it was the fused loss, except after unpickling, until `fuse` is called again
        assert fuse(wrapped).problem is None or (wrapper, first, again) == ("pickle", "fuse", False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.usefixtures("no_logits")
def test_autocast_and_bfloat16(dtype: torch.dtype | None) -> None:
    """The fused gradient is closer to float32 than transformers' own, which rounds the logits."""
    exact = gradients(make("gemma2"), **batch())
    errors = []
    for fused in (False, True):
        model = make("gemma2") if dtype is None else make("gemma2").to(dtype)
        if fused:
            fuse(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            found = gradients(model, **batch())
            logits = model(**batch()).logits
            dtypes = [x.dtype for x in (logits, logits.float(), logits.to(torch.half))]
        assert dtypes == [torch.bfloat16, torch.float32, torch.half]
        errors.append(sum((found[name].float() - exact[name]).norm() for name in exact))
    assert errors[1] < 1.05 * errors[0]


def test_logits_are_computed_when_they_are_read() -> None:
    model, inputs = make("gemma2", tie_word_embeddings=False), batch()
    model.lm_head.bias = nn.Parameter(torch.ones(V))
    expected = model(**inputs).logits
    with torch.autocast("cpu", torch.half):
        half = model(**inputs).logits
        fuse(model)
        late = model(**inputs).logits
    torch.testing.assert_close(late * 1, half, rtol=0, atol=0)  # read outside of autocast
    lazy = model(inputs["input_ids"], *[None] * 4, inputs["labels"]).logits
    assert isinstance(lazy, LazyLogits)
    assert lazy.record.logits is None
    assert (lazy.shape, lazy.dtype, lazy.requires_grad) == (expected.shape, torch.float32, True)
    assert lazy.record.logits is None
    torch.testing.assert_close(torch.ones(1) * (lazy.float() * 2), expected * 2, rtol=0, atol=0)
    torch.testing.assert_close(lazy.detach(), expected.detach(), rtol=0, atol=0)
    torch.testing.assert_close(lazy.to(dtype=torch.float64), expected.double(), rtol=0, atol=0)
    lazy[..., 3] = 7.0
    assert ((lazy * 2)[..., 3] == 14).all()
    assert not (lazy[..., 4] == 7).any()
    functions = (
        lambda x: x.logsumexp(-1),
        lambda x: token_logprobs(x, inputs["input_ids"])[0],
        lambda x: fused_gac_loss(x, inputs["labels"]).loss,
    )
    for function in functions:
        grads = [
            torch.autograd.grad(function(x).sum(), model.parameters(), retain_graph=True)
            for x in (expected, model(**inputs).logits)
        ]
        torch.testing.assert_close(*grads, rtol=0, atol=0)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            values = model(**inputs).logits
        copied = copy.deepcopy(values.float() * 2)
        torch.testing.assert_close(copied.numpy(), expected.detach().numpy() * 2, rtol=0, atol=0)
    divided = model(**inputs).logits
    divided.div_(2.0)
    torch.testing.assert_close(divided.record.full(), expected / 2, rtol=0, atol=0)
    first, *_, last = model.parameters()  # the embedding, and the bias of the head
    for trained in (first, last):
        model.requires_grad_(False)
        trained.requires_grad_(True)
        assert model(**inputs).logits.requires_grad
    stale = model(**inputs).logits
    with torch.no_grad():
        last.mul_(2)
    assert (lazy[..., 3] == 7).all()  # computed before
    with pytest.raises(RuntimeError, match="before the optimizer's step"):
        stale.float().sum()


def test_calls_without_labels_generation_and_saving_are_unchanged(tmp_path: Path) -> None:
    model, ids = make("gemma2").eval(), batch()["input_ids"]
    expected, keys = model(ids).logits, list(model.state_dict())
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    handle = fuse(model)
    model(**batch())
    with pytest.raises(IndexError):
        model(ids + V, labels=ids)
    assert type(model(ids).logits) is Tensor
    torch.testing.assert_close(model(ids, *[None] * 4).logits, expected, rtol=0, atol=0)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), generated)
    assert list(model.state_dict()) == keys
    replica = model.lm_head._replicate_for_data_parallel()  # by DataParallel, one per GPU
    assert replica.forward.__self__ is replica
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=0)
    handle.lazy = True  # on request, these logits are lazy too
    assert isinstance(model(ids).logits, LazyLogits)
    assert "DataParallel" in str(handle.reason)


def test_a_model_that_cannot_be_served_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gac_kernels"):
        assert fuse(nn.Linear(2, 2)).reason == "it is not a model of transformers"
        model = make("llama")
        model.loss_function = lambda logits, labels, **_: logits.float().mean()
        expected = gradients(model, **batch())
        assert fuse(model).reason
        check(gradients(model, **batch()), expected, 0)
        assert "keeps its own loss" in caplog.text
        caplog.clear()
        other = make("llama")
        own = type(other).forward
        other.forward = lambda input_ids, labels=None: own(other, input_ids, labels=labels)
        other.get_output_embeddings().register_forward_hook(lambda m, x, y: y + 1.0)
        expected = gradients(other, **batch())
        handle = fuse(other)
        for _ in range(2):
            check(gradients(other, **batch()), expected, 0)
        assert handle.reason == "it computes its loss from the logits"
        assert caplog.text.count("keeps its own loss") == 1
        handle.undo()
        assert other.forward.__name__ == "<lambda>"


def hooked(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: model.lm_head.register_forward_hook(lambda *x: change(x[-1])) and model


# as with quantized weights, the output is not the product with `weight`
DOUBLED = type("Doubled", (nn.Linear,), {"forward": lambda m, x: 2 * nn.Linear.forward(m, x)})
UNUSUAL: dict[str, Callable[[Any], nn.Module]] = {
    "absolute": hooked(lambda logits: logits + logits.abs()),
    "masked": lambda _: hooked(lambda x: x.__setitem__((..., 5), -9.0) or x)(make("llama")),
    "scaled by column": hooked(lambda logits: logits * torch.linspace(1, 2, V)),
    "scaled by row": hooked(lambda logits: logits * logits.std(-1, keepdim=True)),
    "negative": hooked(lambda logits: logits * -1),
    "squared": hooked(lambda logits: logits * logits),
    "trained scale": lambda m: setattr(m, "logit_scale", nn.Parameter(torch.tensor(0.3))) or m,
    "two layers": lambda m: (
        setattr(m, "lm_head", nn.Sequential(m.lm_head, nn.Linear(V, V, bias=False))) or m
    ),
    "LoRA and a bias": lambda model: lora(make("phi")),
    "own layer": lambda m: setattr(m.lm_head, "__class__", DOUBLED) or m,
    "ZeRO-3": lambda model: setattr(model.lm_head.weight, "ds_id", 7) or model,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_a_record_cannot_express_is_computed(name: str) -> None:
    model, inputs = UNUSUAL[name](make("cohere")), batch()
    inputs |= {"num_items_in_batch": torch.tensor(40), "shift_labels": inputs["labels"]}
    expected = gradients(model, **inputs)
    handle = fuse(model)
    check(gradients(model, **inputs), expected)
    assert handle.reason


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of different lengths, so that micro-batches have different numbers of labels."""

    def __init__(self, count: int) -> None:
        rows = batch(count)
        lengths = torch.randint(3, 9, (count,), generator=torch.Generator().manual_seed(2))
        late = torch.arange(9) > lengths[:, None]
        self.rows = {**rows, "labels": rows["labels"].masked_fill(late, -100)}

    def __len__(self) -> int:
        return len(self.rows["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[index] for name, x in self.rows.items()}


def make_trainer(
    model: nn.Module, folder: Path, kind: type[Trainer] = Trainer, rows: int = 24, **options: Any
) -> Trainer:
    settings = {"max_steps": 8, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    settings |= {"logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(str(folder), **{**settings, "disable_tqdm": True, **options})
    return kind(model, arguments, train_dataset=Rows(rows), eval_dataset=Rows(5))


def train(model: nn.Module, folder: Path, **options: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    """Train on the rows; returns the trainer and the log of each step."""
    trainer = make_trainer(model, folder, **options)
    trainer.train()
    return trainer, [row for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
@pytest.mark.usefixtures("no_logits")
def test_steps_of_trainer(family: str, tmp_path: Path) -> None:
    _, expected = train(make(family), tmp_path)
    model = make(family)
    handle = fuse(model)
    _, found = train(model, tmp_path)
    assert handle.problem is None
    assert len(found) == 8
    for key in ("loss", "grad_norm"):
        values = [row[key] for row in expected]
        assert [row[key] for row in found] == pytest.approx(values, rel=1e-5, abs=1e-5), key


def test_evaluation_with_trainer(tmp_path: Path) -> None:
    found = []
    for fused in (False, True):
        model = make("gemma2")
        if fused:
            fuse(model)
        trainer, _ = train(model, tmp_path, max_steps=1)
        output = trainer.predict(Rows(5))
        trainer.args.prediction_loss_only = True
        found.append((output.predictions, trainer.evaluate()["eval_loss"], output.metrics))
    assert found[1][0].shape == (5, 9, V)
    torch.testing.assert_close(*(torch.from_numpy(x[0]) for x in found), rtol=1e-5, atol=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)
    assert found[1][2]["test_loss"] == pytest.approx(found[0][1], rel=1e-6)


KINDS = "DDP", "DDP unused", "FSDP2", "FSDP2 reshard", "FSDP2 head"


def wrapped(kind: str, first: str) -> nn.Module:
    """A fused model, before or after it is wrapped."""
    model: Any = make("gemma2", tie_word_embeddings=kind != "FSDP2 head")
    if first == "fuse":
        fuse(model)
    if kind.startswith("DDP"):
        model = DistributedDataParallel(model, find_unused_parameters=kind == "DDP unused")
    else:
        # the hidden states and the sharded weights differ in their dtype
        policy = {"mp_policy": MixedPrecisionPolicy(torch.float64)} if "reshard" in kind else {}
        for layer in model.model.layers:
            fully_shard(layer, **policy)
        if kind == "FSDP2 head":
            fully_shard(model.lm_head)
        fully_shard(model, reshard_after_forward=kind != "FSDP2", **policy)
    fuse(model)
    return model


def distributed(first: str) -> dict[str, dict[str, Tensor]]:
    """Of each kind, this rank's loss and the gradients, averaged over the ranks."""
    dist.init_process_group("gloo")
    results = {}
    for kind in KINDS:
        found = gradients(wrapped(kind, first), **share(dist.get_rank()))
        named = ((name.removeprefix("module."), grad) for name, grad in found.items())
        results[kind] = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in named}
    return results


def share(rank: int) -> dict[str, Tensor]:
    return {name: x[rank::2] for name, x in batch(4).items()}


@pytest.mark.parametrize(
    "first",
    [
        "fuse",
        pytest.param("wrap", marks=pytest.mark.full(reason="test_inside_wrappers has both orders")),
    ],
)
def test_two_ranks(first: str) -> None:
    results = run(distributed, first, ranks=2)
    for kind in KINDS:
        model = make("gemma2", tie_word_embeddings=kind != "FSDP2 head")
        halves = [gradients(model, **share(rank)) for rank in range(2)]
        mean = {name: (x + halves[1][name]) / 2 for name, x in halves[0].items()}
        for half, found in zip(halves, (result[kind] for result in results), strict=True):
            check(found, mean | {"loss": half["loss"]})
