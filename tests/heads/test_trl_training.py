"""FusedGRPOTrainer trains as GRPOTrainer does, with the options and models that users combine."""

from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.15")

from peft import LoraConfig  # noqa: E402 - after the skip
from trl import GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402 - after the skip

from gac_kernels.heads.trl import (  # noqa: E402 - after the skip
    FusedGRPOMixin,
    FusedGRPOTrainer,
    apply_fused_head,
)
from tests.integrations import plain, recording, tiny, trl_task  # noqa: E402 - after the skip

MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "softcap": {"model_type": "gemma2", "final_logit_softcapping": 2.0},
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
BFLOAT16 = 2e-2  # TRL's head rounds its logits to bfloat16, ours does not
TRAININGS: dict[str, tuple[str, dict[str, Any], float]] = {
    "untied head": ("untied", {}, 1e-5),
    "softcap": ("softcap", {}, 1e-5),
    "reuse of rollouts": ("tied", {"num_iterations": 2, "beta": 0.1, "max_steps": 2}, 1e-5),
    "gradient checkpointing": ("tied", {"gradient_checkpointing": True}, 1e-5),
    "LoRA": ("untied", {"peft_config": LORA, "beta": 0.1}, 1e-5),
    "autocast": ("tied", {"bf16": True}, BFLOAT16),
    "float32 head": ("tied", {"bf16": True, "cast_lm_head_to_fp32": True}, BFLOAT16),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        tiny.write_model(folder / name, **changes)
    return {name: folder / name for name in MODELS}


@pytest.mark.parametrize("name", TRAININGS)
def test_gradients_equal_those_of_trl(models: dict[str, Path], tmp_path: Path, name: str):
    """With two micro-batches per step; SGD does not amplify rounding between the steps."""
    model, options, tolerance = TRAININGS[name]
    runs = []
    for kind in (GRPOTrainer, FusedGRPOTrainer):
        trainer, recorder = trl_task.trained(models[model], tmp_path, kind, optim="sgd", **options)
        runs.append((trainer, recorder))
    assert runs[1][0].rollout_out is not None
    (own, expected), (fused, actual) = runs
    assert len(actual.gradients) == len(expected.gradients) == options.get("max_steps", 1)
    for a, b in zip(actual.gradients, expected.gradients, strict=True):
        assert plain.relative_error(a, b) < tolerance
    for column in ("loss", "entropy", "clip_ratio/region_mean"):
        assert recording.column(fused, column) == pytest.approx(
            recording.column(own, column), rel=tolerance, abs=tolerance
        )


def test_resuming_is_exact(models: dict[str, Path], tmp_path: Path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    weights = []
    for checkpoint in (None, str(tmp_path / "checkpoint-1")):
        with apply_fused_head():
            trainer, _ = trl_task.make_trainer(
                models["tied"], tmp_path, FusedGRPOTrainer, **options
            )
            trainer.train(resume_from_checkpoint=checkpoint)
        weights.append(recording.weights(trainer))
    for name, weight in weights[0].items():
        assert torch.equal(weights[1][name], weight), name


class OtherLoss(GRPOTrainer):
    """A subclass with a loss of its own, as TRL's experimental trainers are."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return 3 * super()._compute_loss(model, inputs)


class OtherLogprobs(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
        logps, *rest = super()._get_per_token_logps_and_entropies(*args, **keywords)
        return logps / 2, *rest


@pytest.mark.parametrize(
    ("kind", "method"),
    [(OtherLoss, "_compute_loss"), (OtherLogprobs, "_get_per_token_logps_and_entropies")],
)
def test_the_loss_of_a_subclass_is_kept(models, tmp_path: Path, caplog, kind: type, method: str):
    gradients = []
    for trainer in (kind, type("Fused", (FusedGRPOMixin, kind), {})):
        _, recorder = trl_task.trained(models["tied"], tmp_path, trainer)
        gradients.append(recorder.gradients[0])
    assert plain.relative_error(gradients[1], gradients[0]) < 1e-5
    assert f"does not support the loss of a subclass, {kind.__name__}.{method}" in caplog.text


def test_a_trainer_with_another_loss_is_refused():
    class FusedSFTTrainer(FusedGRPOMixin, SFTTrainer):
        pass

    with pytest.raises(TypeError, match=r"FusedSFTTrainer is not a GRPO.*apply_fused_head\(\)"):
        FusedSFTTrainer()


@pytest.mark.parametrize("kind", [SFTTrainer, FusedGRPOTrainer])
def test_liger_is_refused(models: dict[str, Path], tmp_path: Path, kind: type):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    message = f"use_liger_kernel=True: {kind.__name__} .*set use_liger_kernel=False"
    with pytest.raises(ValueError, match=message):
        if kind is FusedGRPOTrainer:
            trl_task.make_trainer(models["tied"], tmp_path, kind, use_liger_kernel=True)
        options = SFTConfig(str(tmp_path), use_cpu=True, use_liger_kernel=True)
        model = AutoModelForCausalLM.from_pretrained(models["tied"])
        with apply_fused_head():
            SFTTrainer(model, options, train_dataset=Dataset.from_list([{"text": "1+1=2"}]))
