"""What the adapter tests record of the trainers: gradients, weights and logged values."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from transformers import TrainerCallback


class GradientRecorder(TrainerCallback):
    """Records the gradient of each optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})


def message_of(kind: type[Exception], call: Callable[..., object], *arguments: object) -> str:
    """The message of the error of this kind that the call must raise."""
    with pytest.raises(kind) as error:
        call(*arguments)
    return str(error.value)


def column(trainer: Any, name: str) -> list[float]:
    """The values of `name` that a trainer of transformers logged, one per step."""
    return [row[name] for row in trainer.state.log_history if name in row]


def weights(trainer: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def record_full_gradients(worker: Any) -> list[dict[str, Tensor]]:
    """Return a list to which each optimizer step of verl's worker appends its full gradient."""
    gradients: list[dict[str, Tensor]] = []
    optimizer_step = worker.engine.optimizer_step

    def recording_step() -> Any:
        named = worker.engine.module.named_parameters()
        gradients.append({n: p.grad.full_tensor().clone() for n, p in named})
        return optimizer_step()

    worker.engine.optimizer_step = recording_step
    return gradients


def full_weights(worker: Any) -> dict[str, Tensor]:
    """The weights of verl's worker, gathered from all ranks."""
    return {n: p.detach().full_tensor() for n, p in worker.engine.module.named_parameters()}
