"""Our heads inside other trainers, with the pretrained model, against their plain form.

prime-rl and OpenRLHF need their sources, as in test_lazy_heads.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from bench import bench_trl
from gac_kernels.heads import openrlhf, prime_rl
from gac_kernels.heads.transformers import Record, fuse

from .conftest import ABSENT, SOURCES

pytestmark = pytest.mark.real
TOLERANCE = 1e-5
TEXT = "We sold 12 + 7 tickets. How many is that? 19. A customer orders 14 green lamps."


@pytest.fixture(scope="module")
def ids(real_model: Path) -> Tensor:
    """Two rows of text [2, T]."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    row = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    return torch.cat([row, row.flip(1)])


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def norm(model: torch.nn.Module) -> float:
    grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(grads).norm())


@pytest.mark.parametrize("trainer", ["SFT", "DPO", "GRPO"])
@pytest.mark.usefixtures("real_model")
def test_trl(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.15", reason="needs TRL")
    model, update = bench_trl.make_update(trainer, bench_trl.REAL_CASE, tmp_path, "cpu")
    providers = [bench_trl.OWN, bench_trl.HEAD]
    losses, norms, gradients = {}, {}, {}
    for provider in [*providers, bench_trl.LOSS] if trainer == "GRPO" else providers:
        losses[provider] = update(provider)
        norms[provider] = norm(model)
        gradients[provider] = bench_trl.gradient(model)
    own = bench_trl.OWN
    assert norms[own] > 0.1
    for provider, gradient in gradients.items():
        assert losses[provider] == pytest.approx(losses[own], rel=TOLERANCE, abs=1e-6)
        assert norms[provider] == pytest.approx(norms[own], rel=TOLERANCE)
        assert (gradient - gradients[own]).norm() < 1e-4 * norms[own]


def test_fuse_in_the_trainer_of_transformers(
    real_model: Path, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps with SGD, which does not amplify rounding between them."""
    rows = [{"input_ids": row, "labels": row} for row in ids] * 6
    logs = []
    for fused in (False, True):
        options = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=3,
            learning_rate=1e-3,
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        )
        trainer = Trainer(load(real_model), options, train_dataset=rows)
        if fused:
            fuse(trainer.model)
            monkeypatch.setattr(Record, "full", None)  # the logits are not computed
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "grad_norm" in entry])
    assert len(logs[0]) == 3
    assert logs[0][2]["loss"] < logs[0][0]["loss"]
    for expected, actual in zip(*logs, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_prime_rl(sources: Any, real_model: Path, ids: Tensor) -> None:
    name = "prime_rl.trainer.models.layers.lm_head"
    module = sources(SOURCES / "prime-rl/src", name, ABSENT["prime-rl"])
    model = load(real_model)
    head = module.FusedOutputLinear(576, len(model.lm_head.weight), chunk_size=1024)
    head.weight = model.lm_head.weight
    temperature = torch.full(ids.shape, 0.7)

    def results() -> tuple[Tensor, Tensor, float]:
        model.zero_grad()
        hidden = model.model(ids[:, :-1]).last_hidden_state
        out = head(hidden, ids[:, 1:].contiguous(), temperature[:, 1:].contiguous())
        out["logprobs"].sum().backward()
        return out["logprobs"].detach(), out["entropy"].detach(), norm(model)

    expected = results()
    with prime_rl.apply_fused_head():
        actual = results()
    torch.testing.assert_close(actual[0], expected[0], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(actual[1], expected[1], rtol=TOLERANCE, atol=TOLERANCE)
    assert actual[2] == pytest.approx(expected[2], rel=TOLERANCE)


def test_openrlhf(
    sources: Any, real_model: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs and gradients are OpenRLHF's; entropies are those of the head in float64.

    OpenRLHF computes an entropy as the difference of two large float32 numbers.
    """
    module = sources(SOURCES / "OpenRLHF", "openrlhf.models.actor", ABSENT["OpenRLHF"])
    model = load(real_model)
    actor = module.Actor(model, temperature=1.0)
    actor.packing_samples = False
    with torch.no_grad():
        hidden = model.model(ids[:, :-1]).last_hidden_state.double()
        exact = (hidden @ model.lm_head.weight.double().T).log_softmax(-1)
    entropy = -(exact.exp() * exact).sum(-1)

    def results() -> tuple[Tensor, Tensor, float]:
        model.zero_grad()
        options = {"return_output": True, "return_entropy": True}
        logps, out = actor(ids, torch.ones(2, 8), torch.ones_like(ids), **options)
        logps.sum().backward()
        return logps.detach(), out.entropy.detach()[:, : entropy.shape[1]], norm(model)

    theirs = results()
    with openrlhf.apply_fused_head():
        monkeypatch.setattr(Record, "full", None)  # the logits are not computed
        ours = results()
    torch.testing.assert_close(ours[0], theirs[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert ours[2] == pytest.approx(theirs[2], rel=TOLERANCE)
    error, own_error = ((x[1] - entropy).abs().max().item() for x in (ours, theirs))
    print(f"largest error of an entropy: {error:.1e}, OpenRLHF's {own_error:.1e}")
    assert error < 2e-5
    assert error < own_error
