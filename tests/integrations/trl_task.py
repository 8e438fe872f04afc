"""Run the real TRL on a tiny model, and record what it computes."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from gac.data.rows import Row
from gac.demo.task import rows, tokenizer
from gac.integrations.trl import GACTrainer
from gac.methods import GAC, Constant
from tests.integrations.tiny import demonstrations

TEMPERATURE = 0.7


def prompts() -> Dataset:
    drawn = rows(random.Random(0), ["+", "-"] * 16)
    return Dataset.from_list([{"prompt": row["prompt"]} for row in drawn])


def demos() -> Dataset:
    return Dataset.from_list(demonstrations())


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


class Watch(TrainerCallback):
    """Keeps the gradient of each optimiser step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        named = known["model"].named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})


class Recorded(GACTrainer):
    """Keeps the inputs of each micro-batch and the demonstrations of each step."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.seen: list[dict[str, Any]] = []
        self.shown: list[list[Row]] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.seen.append(dict(inputs))
        return super()._compute_loss(model, inputs)

    def _demo_loss(self, model: Any) -> Tensor:
        self.shown.append(list(self._drawn))
        return super()._demo_loss(model)


def trainer(
    model: Path,
    out: Path,
    kind: type[GRPOTrainer] = Recorded,
    *,
    controller: Any = None,
    peft_config: Any = None,
    demo_dataset: Any = None,
    demo_batch: int = 5,
    **changes: Any,
) -> tuple[Any, Watch]:
    """Build a trainer (one step by default) and its gradient recorder; `changes` are passed to
    GRPOConfig.
    """
    watch = Watch()
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
    ours: dict[str, Any] = {}
    if issubclass(kind, GACTrainer):
        ours = {
            "demo_dataset": demos() if demo_dataset is None else demo_dataset,
            "demo_batch": demo_batch,
            "controller": Constant(mu=0.3) if controller is None else controller,
        }
    made = kind(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=share_of_digits,
        args=GRPOConfig(**options),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        callbacks=[watch],
        peft_config=peft_config,
        **ours,
    )
    return made, watch


def column(made: Any, name: str) -> list[float]:
    """The logged values of `name`, one per step."""
    return [row[name] for row in made.state.log_history if name in row]


def weights(made: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in made.model.named_parameters()}


def resumed(model: Path, out: Path) -> dict[str, Any]:
    """One rank of a job: four steps with a checkpoint after two, then the last two again from that
    checkpoint.
    """
    gc.freeze()
    options = {
        "controller": GAC(update_every=2),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "beta": 1e-30,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    made, watch = trainer(model, out, **options)
    made.train()
    again, _ = trainer(model, out, **options)
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    rank = made.accelerator.process_index
    stray, _ = trainer(model, out, controller=Constant(mu=0.1 + 0.1 * rank))
    try:
        stray.train()
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    return {
        "gradient": watch.gradients[0],
        "seen": made.seen[:2],
        "shown": made.shown[0],
        "mu": made.mixer.mu,
        "logged": column(made, "gac/mu"),
        "weights": weights(made),
        "again": weights(again),
        "again_mu": again.mixer.mu,
        "refusal": refusal,
    }
