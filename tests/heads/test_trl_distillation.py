"""TRL's DistillationTrainer with our divergence: same values, gradients and training."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.16")

from datasets import Dataset  # noqa: E402 - after the skip
from transformers import AutoModelForCausalLM  # noqa: E402 - after the skip
from trl import DistillationConfig, DistillationTrainer  # noqa: E402 - after the skip
from trl.trainer import distillation_trainer  # noqa: E402 - after the skip

from gac.demo import task  # noqa: E402 - after the skip
from gac_kernels.heads.trl import apply_fused_head  # noqa: E402 - after the skip
from gac_kernels.heads.trl.distillation import HOOK, divergence_loss  # noqa: E402 - after the skip
from tests.integrations import plain, recording, tiny  # noqa: E402 - after the skip

B, T, H, H_T, V = 3, 4, 8, 12, 37
OPTIONS: dict[str, dict[str, Any]] = {
    "mean over the batch": {},
    "items": {"num_items_in_batch": torch.tensor(17)},
    "a number of items": {"num_items_in_batch": 17.0},
    "scaled": {"student_logit_scale": 0.5, "teacher_logit_scale": 1.5, "temperature": 0.7},
    "softcaps": {"student_final_logit_softcapping": 2.0, "teacher_final_logit_softcapping": 3.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_values_and_gradients_are_those_of_trl(beta: float, options: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = {"hidden": (B, T, H), "weight": (V, H), "student_lm_head_bias": (V,)}
    leaves = {k: torch.randn(s, generator=g).requires_grad_() for k, s in shapes.items()}
    hidden, weight, bias = leaves.values()
    teacher, teacher_weight, teacher_bias = (
        torch.randn(s, generator=g) for s in ((B, T, H_T), (V, H_T), (V,))
    )
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 2:] = mask[2] = 0
    results = []
    for function in (getattr(distillation_trainer, HOOK), divergence_loss):
        out = function(
            hidden,
            teacher,
            weight,
            teacher_weight,
            mask,
            beta,
            student_lm_head_bias=bias,
            teacher_lm_head_bias=teacher_bias,
            **options,
        )
        results.append((*out, *torch.autograd.grad(out[0], [hidden, weight, bias])))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)


def test_a_rank_without_a_valid_token() -> None:
    hidden = torch.ones(1, 2, H, requires_grad=True)
    mask = torch.zeros(1, 2, dtype=torch.long)
    weights = torch.ones(V, H), torch.ones(V, H_T)
    loss, entropy, count = divergence_loss(hidden, torch.ones(1, 2, H_T), *weights, mask, 0.0)
    loss.backward()
    assert (loss, entropy, count) == (0, 0, 0)
    assert (hidden.grad == 0).all()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another width with a softcap."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_model(folder / "student")
    tiny.write_model(folder / "teacher", model_type="gemma2", final_logit_softcapping=2.0)
    return folder / "student", folder / "teacher"


def train(models: tuple[Path, Path], out: Path, **options: Any) -> tuple[Any, list[Any]]:
    recorder = recording.GradientRecorder()
    problems = task.rows(random.Random(0), ["+", "-"] * 16)
    trainer = DistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(models[0]),
        teacher_model=AutoModelForCausalLM.from_pretrained(models[1]),
        args=DistillationConfig(
            output_dir=str(out),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_completion_length=6,
            learning_rate=1e-2,
            optim="sgd",
            bf16=False,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in problems]),
        processing_class=task.make_tokenizer(),
        callbacks=[recorder],
    )
    trainer.train()
    return trainer, recorder.gradients


@pytest.mark.parametrize(("beta", "steps"), [(0.0, 3), (0.5, 20), (1.0, 3)])
def test_training_equals_that_of_trl(
    models: tuple[Path, Path], tmp_path: Path, beta: float, steps: int
) -> None:
    """Losses and gradients of on-policy distillation."""
    own, expected = train(models, tmp_path / "own", beta=beta, max_steps=steps)
    with apply_fused_head():
        assert getattr(distillation_trainer, HOOK) is divergence_loss
        fused, actual = train(models, tmp_path / "fused", beta=beta, max_steps=steps)
    assert getattr(distillation_trainer, HOOK) is not divergence_loss
    assert len(actual) == steps
    for name in ("loss", "entropy", "grad_norm"):
        column = recording.column(own, name)
        assert len(column) == steps
        assert recording.column(fused, name) == pytest.approx(column, rel=1e-5, abs=1e-7), name
    for a, b in zip(actual, expected, strict=True):
        assert plain.relative_error(a, b) < 1e-5
