"""Run the real TRL on a tiny model, and record what it computes."""

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from gac.demo import task
from gac.integrations.trl import GACTrainer
from gac.methods import GAC, Constant
from gac.rows import Row
from gac_kernels.heads.trl import FusedGRPOTrainer
from tests.integrations.recording import GradientRecorder, column, message_of, weights
from tests.integrations.tiny import demonstrations

TEMPERATURE = 0.7


def digit_fraction(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


class RecordingTrainer(GACTrainer):
    """Records the inputs of each micro-batch and the demonstrations of each step."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.micro_batches: list[dict[str, Any]] = []
        self.demos_per_step: list[list[Row]] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.micro_batches.append(dict(inputs))
        return super()._compute_loss(model, inputs)

    def _demo_loss(self, model: Any) -> Tensor:
        self.demos_per_step.append(list(self._step_demos))
        return super()._demo_loss(model)


def make_trainer(
    model: Path,
    out: Path,
    trainer_class: type[GRPOTrainer] = RecordingTrainer,
    *,
    controller: Any = None,
    peft_config: Any = None,
    demo_dataset: Any = None,
    demo_batch: int = 5,
    teacher: Any = None,
    teacher_model: Any = None,
    **changes: Any,
) -> tuple[Any, GradientRecorder]:
    """Build a trainer (one step by default) and its gradient recorder.

    `changes` are passed to GRPOConfig.
    """
    recorder = GradientRecorder()
    problems = task.rows(random.Random(0), ["+", "-"] * 16)
    options: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 6,
        "max_steps": 1,
        "temperature": TEMPERATURE,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.0,
        "seed": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **changes,
    }
    gac_options: dict[str, Any] = {}
    if issubclass(trainer_class, GACTrainer):
        gac_options = {
            "demo_dataset": Dataset.from_list(demonstrations())
            if demo_dataset is None
            else demo_dataset,
            "demo_batch": demo_batch,
            "controller": Constant(mu=0.3) if controller is None else controller,
            "teacher": teacher,
            "teacher_model": teacher_model,
        }
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=digit_fraction,
        args=GRPOConfig(**options),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in problems]),
        processing_class=task.make_tokenizer(),
        callbacks=[recorder],
        peft_config=peft_config,
        **gac_options,
    )
    return trainer, recorder


def trained(*arguments: Any, **options: Any) -> tuple[Any, GradientRecorder]:
    """`make_trainer`, and its training."""
    trainer, recorder = make_trainer(*arguments, **options)
    trainer.train()
    return trainer, recorder


def sharded_gradients(model: Path, out: Path) -> list[dict[str, Tensor]]:
    """Gradients of TRL's loss and ours for one micro-batch, with all weights sharded by FSDP2.

    The model's head must not be tied.
    """
    trainer, _ = make_trainer(model, out, FusedGRPOTrainer)
    network, rank = trainer.model.train(), trainer.accelerator.process_index
    for part in (*network.model.layers, network.lm_head, network):
        fully_shard(part)
    draw = torch.Generator().manual_seed(rank)
    prompts, completions = (torch.randint(3, 9, (4, n), generator=draw) for n in (5, 6))
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": (torch.arange(6) < torch.tensor([[6], [3], [0], [5]])).long(),
        "advantages": torch.randn(4, generator=draw),
        "num_items_in_batch": torch.tensor(28),
    }
    trainer.current_gradient_accumulation_steps = 1
    gradients = []
    for kind in (GRPOTrainer, FusedGRPOTrainer):
        trainer.__class__ = kind
        network.zero_grad()
        trainer._compute_loss(network, dict(inputs)).backward()
        named = network.named_parameters()
        gradients.append({n: p.grad.full_tensor() for n, p in named if p.grad is not None})
    assert trainer.rollout_out is not None
    return gradients


def train_and_resume(model: Path, untied: Path | None, out: Path) -> dict[str, Any]:
    """Run one rank: four steps with a checkpoint after two, then the last two again from it.

    untied: a model for `sharded_gradients`; None skips them.
    """
    options = {
        "controller": GAC(update_every=2),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "beta": 1e-30,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer, recorder = trained(model, out, **options)
    resumed, _ = make_trainer(model, out, **options)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    rank = trainer.accelerator.process_index
    mismatched, _ = make_trainer(model, out, controller=Constant(mu=0.1 + 0.1 * rank))
    return {
        "gradient": recorder.gradients[0],
        "micro_batches": trainer.micro_batches[:2],
        "demos": trainer.demos_per_step[0],
        "mu": trainer.mixer.mu,
        "logged": column(trainer, "gac/mu"),
        "weights": weights(trainer),
        "resumed": weights(resumed),
        "resumed_mu": resumed.mixer.mu,
        "error_message": message_of(RuntimeError, mismatched.train),
        "sharded": sharded_gradients(untied, out) if untied else [],
    }
