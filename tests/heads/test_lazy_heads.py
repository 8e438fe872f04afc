"""prime-rl, OpenRLHF and SkyRL: their own code with our head, against their own head.

Needs their sources, except for two tests: set GAC_TRAINER_SOURCES to a folder with checkouts
named prime-rl, OpenRLHF and SkyRL. Packages that need a GPU (deepspeed, flash-attn) are replaced by
empty modules.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gac_kernels.heads import openrlhf, prime_rl, skyrl
from gac_kernels.heads.transformers import Record

from .conftest import ABSENT, SOURCES
from .test_transformers import check, make


def test_prime_rl(sources: Any) -> None:
    name = "prime_rl.trainer.models.layers.lm_head"
    module = sources(SOURCES / "prime-rl/src", name, ABSENT["prime-rl"])
    torch.manual_seed(0)
    head = module.FusedOutputLinear(16, 97, chunk_size=4)
    hidden, labels = torch.randn(2, 7, 16, requires_grad=True), torch.randint(97, (2, 7))
    temperature, weights = torch.rand(2, 7) + 0.5, torch.randn(2, 7)

    def results() -> dict[str, Tensor]:
        out = head(hidden, labels, temperature)
        grads = torch.autograd.grad((out["logprobs"] * weights).sum(), (hidden, head.weight))
        return dict(zip("lehw", (out["logprobs"], out["entropy"].detach(), *grads), strict=True))

    expected = results()
    with prime_rl.apply_fused_head():
        check(results(), expected)


def test_prime_rl_divides_logits_by_the_temperature_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight, inverse = torch.randn(9, 64).bfloat16(), torch.randn(97, 64), torch.rand(9) + 1
    logits = (hidden.double() @ weight.bfloat16().double().T) * inverse[:, None]
    logps, _ = prime_rl.FusedLogProbs.apply(hidden, weight, torch.arange(9), inverse, 4)
    torch.testing.assert_close(
        logps.double(), logits.log_softmax(-1)[:, :9].diag(), rtol=0, atol=2e-4
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_openrlhf(sources: Any, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sources(SOURCES / "OpenRLHF", "openrlhf.models.actor", ABSENT["OpenRLHF"])
    model = make("gemma2")
    actor = module.Actor(model, temperature=temperature)
    actor.packing_samples = False
    ids, mask = torch.randint(3, 97, (3, 9)), torch.ones(3, 4)
    weight = 0.1 if temperature == 1 else 0  # OpenRLHF then divides what the entropy still needs

    def results() -> dict[str, Tensor]:
        model.zero_grad()
        with_entropy = {"return_output": True, "return_entropy": True}
        logps, out = actor(ids, mask, torch.ones_like(ids), **with_entropy)
        (logps.sum() + (weight * out.entropy.sum() if weight else 0)).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        return {"logps": logps.detach(), "entropy": out.entropy.detach(), **grads}

    expected = results()
    with openrlhf.apply_fused_head():
        openrlhf.apply_fused_head()
        monkeypatch.setattr(Record, "full", None)  # the logits are not computed
        check(results(), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_skyrl(sources: Any, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "skyrl.backends.skyrl_train.workers.model_wrapper"
    base = "skyrl.backends.skyrl_train"
    absent = ("flash_attn", "flash_attn.bert_padding", "loguru", "jaxtyping")
    absent += (f"{base}.distributed.ulysses.utils", f"{base}.training_batch")
    absent += ("flash_attn.ops.triton.cross_entropy",)
    module = sources(SOURCES / "SkyRL", name, absent)
    utils = importlib.import_module(f"{base}.utils.torch_utils")
    monkeypatch.setattr(utils, "FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    model = make("gemma2")
    ids, mask = torch.randint(3, 97, (3, 9)), torch.ones(3, 9, dtype=torch.long)

    def results() -> dict[str, Tensor]:
        wrapper = module.HFModelWrapper(model)
        model.zero_grad()
        logps, out = wrapper(
            ids, 4, mask, temperature=temperature, return_output=True, compute_entropy=True
        )
        (logps.sum() + 0.1 * out["entropy"].sum()).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        return {"logps": logps.detach(), "entropy": out["entropy"].detach(), **grads}

    expected = results()
    with skyrl.apply_fused_head():
        monkeypatch.setattr(Record, "full", None)  # the logits are not computed
        check(results(), expected)


class Actor:
    """Stand-in for the actors of OpenRLHF and SkyRL."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits


def test_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their functions return our values for lazy logits, and their own for others."""
    model, ids = make("gemma2"), torch.randint(3, 97, (3, 9))
    rows = model(ids).logits.log_softmax(-1)
    logps, entropy = rows.gather(-1, ids[..., None])[..., 0], -(rows.exp() * rows).sum(-1)
    monkeypatch.setattr(Record, "full", None)  # the logits are not computed
    for adapter, name, kind, *functions in (
        (openrlhf, "openrlhf.models.actor", "Actor", "log_probs_from_logits", "compute_entropy"),
        (
            *(skyrl, "skyrl.backends.skyrl_train.workers.model_wrapper", "HFModelWrapper"),
            *("logprobs_from_logits", "chunked_entropy_from_logits"),
        ),
    ):
        module = ModuleType(name)
        vars(module).update({kind: Actor, **dict.fromkeys(functions, lambda *_: "own")})
        monkeypatch.setitem(sys.modules, name, module)
        with adapter.apply_fused_head():
            logits = Actor(model).forward(ids)
            first, second = (getattr(module, name) for name in functions)
            check({"l": first(logits, ids), "e": second(logits)}, {"l": logps, "e": entropy})
            assert first(rows, ids) == "own"
    warm = openrlhf._log_probs(logits, ids, 0.7)
    torch.testing.assert_close(warm, openrlhf._log_probs(logits / 0.7, ids))
    masked = skyrl._entropy(logits, False, ids % 2)
    assert not masked.requires_grad
    assert torch.equal(masked, second(logits) * (ids % 2))
    monkeypatch.undo()
    monkeypatch.setattr(Record, "linear", lambda _: None)  # the logits are computed
    torch.testing.assert_close(warm, openrlhf._log_probs(logits, ids, 0.7))
