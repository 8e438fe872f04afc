"""Micro-batches and ranks do not change the gradient of a step, in each trainer.

Two bugs of published trainers (arXiv 2604.23747) are applied on purpose and must be noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl")

import gac.integrations.trl_grpo
import gac.models.head
import gac_kernels.transformers
from gac.integrations.trl import FusedGRPOTrainer, GACTrainer
from gac.rollouts import engines
from gac.training.trainer import Trainer
from tests import ranks as processes
from tests.integrations import test_fuse, trl_task
from tests.integrations.plain import relative_error
from tests.integrations.tiny import write_model
from tests.parallel.test_distributed import fixed_responses
from tests.tiny import tiny_config, write_tiny

ROWS = 16
Gradient = dict[str, Tensor]


class Run(NamedTuple):
    """One optimizer step of a trainer."""

    model: nn.Module
    train: Callable[[], object]
    gradients: list[Gradient]  # one, after `train`


def own_trainer(folder: Path, micro_batches: int, ranks: int, **budget: Any) -> Run:
    """`gac train`, with as many demonstrations as rollouts.

    budget: of tokens, for two micro-batches or more.
    """
    engines.generate = fixed_responses  # runs in its own process
    size = {"micro_batch_size": 2 * ROWS // (micro_batches * ranks)}
    if budget and micro_batches > 1:  # 40 tokens, or 10: less than most rows have
        size = {"max_tokens_per_micro_batch": 70 - 15 * micro_batches, **budget}
    changes = {**size, "demo_batch_size": ROWS}
    trainer = Trainer(tiny_config(folder, folder / f"{ranks}-{micro_batches}", **changes))
    assert trainer.gradients.forward.micro.packed == (size.get("packing") is True)
    gradients: list[Gradient] = []

    def record(*_: object) -> None:
        named = trainer.model.named_parameters()
        gradients.append({n.removeprefix("module."): p.grad.clone() for n, p in named})

    trainer.optimizer.register_step_pre_hook(record)
    return Run(trainer.model, trainer._train_step, gradients)


def transformers_trainer(folder: Path, micro_batches: int, ranks: int) -> Run:
    """`transformers.Trainer` with a fused model; the rows have different numbers of labels."""
    from transformers import Trainer, TrainingArguments

    model, recorder = test_fuse.make("gemma2"), trl_task.GradientRecorder()
    gac_kernels.transformers.fuse(model)
    arguments = TrainingArguments(
        str(folder),
        max_steps=1,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=ROWS // (micro_batches * ranks),
        gradient_accumulation_steps=micro_batches,
    )
    rows = test_fuse.Rows(ROWS)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[recorder])
    return Run(model, trainer.train, recorder.gradients)


def rollouts(rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's part of a step's rollouts, as GRPOTrainer prepares them."""
    draw = torch.Generator().manual_seed(0)
    prompts, completions = (torch.randint(3, 9, (ROWS, n), generator=draw) for n in (5, 6))
    lengths = torch.randint(1, 7, (ROWS, 1), generator=draw)
    mask = (torch.arange(6) < lengths).long()
    tensors = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.randn(ROWS, generator=draw),
    }
    own = {name: x[rank::ranks] for name, x in tensors.items()}
    return own | {"num_items_in_batch": mask.sum()}


def trl(kind: Any, folder: Path, micro_batches: int, ranks: int) -> Run:
    """TRL's training loop, with given rollouts."""

    class GivenRollouts(kind):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            assert len(inputs) == ROWS // ranks
            return rollouts(self.accelerator.process_index, ranks)

    options = {
        "per_device_train_batch_size": ROWS // (micro_batches * ranks),
        "gradient_accumulation_steps": micro_batches,
        "num_generations": 2,
    }
    trainer, recorder = trl_task.make_trainer(folder / "model", folder, GivenRollouts, **options)
    return Run(trainer.model, trainer.train, recorder.gradients)


TRAINERS: dict[str, Callable[[Path, int, int], Run]] = {
    "gac train": own_trainer,
    "gac train, padded": lambda *arguments: own_trainer(*arguments, packing=False),
    "gac train, packed": lambda *arguments: own_trainer(*arguments, packing=True),
    "transformers.Trainer, fuse": transformers_trainer,
    "FusedGRPOTrainer": lambda *arguments: trl(FusedGRPOTrainer, *arguments),
    "GACTrainer": lambda *arguments: trl(GACTrainer, *arguments),
}


@contextlib.contextmanager
def only_the_last_micro_batch(run: Run, micro_batches: int) -> Iterator[None]:
    """DeepSpeed's optimizer with CPU offload: the other micro-batches' gradients are lost."""
    own = Tensor.backward

    def backward(self: Tensor, *arguments: Any, **keywords: Any) -> None:
        run.model.zero_grad()
        own(self, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", backward)
        yield


@contextlib.contextmanager
def mean_of_means(run: Run, micro_batches: int) -> Iterator[None]:
    """OpenRLHF: each micro-batch is divided by its own count, and the results are averaged."""
    own = gac_kernels.fused_linear_gac_loss

    def loss(*arguments: Any, **keywords: Any) -> Any:
        out = own(*arguments, **keywords | {"rollout_norm": None, "demo_norm": None})
        return out._replace(loss=out.loss / micro_batches)

    with pytest.MonkeyPatch.context() as patch:
        for module in (gac_kernels.transformers, gac.integrations.trl_grpo, gac.models.head):
            patch.setattr(module, "fused_linear_gac_loss", loss)
        yield


BUGS = (only_the_last_micro_batch, mean_of_means)


def gradients(name: str, folder: Path, ranks: int) -> dict[tuple[str, int], Gradient]:
    """The gradient of a step by bug ("" for none) and number of micro-batches, on this rank."""
    found = {}
    for bug, count in ((None, 1), (None, 2), (None, 4), *((bug, 2) for bug in BUGS if ranks == 1)):
        run = TRAINERS[name](folder, count, ranks)
        with bug(run, count) if bug else contextlib.nullcontext():
            run.train()
        (gradient,) = run.gradients
        found[bug.__name__ if bug else "", count] = gradient
    return found


@pytest.mark.parametrize("name", TRAINERS)
def test_micro_batches_and_ranks_do_not_change_the_gradient(name: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, demos=ROWS)
    write_model(tmp_path / "model")  # before the ranks read it
    (alone,) = processes.run(gradients, name, tmp_path, 1, ranks=1)
    together = processes.run(gradients, name, tmp_path, 2, ranks=2)
    expected = alone["", 1]
    for found in (alone, *together):
        for (bug, count), gradient in found.items():
            error = relative_error(gradient, expected)
            assert error > 0.01 if bug else error < 1e-5, (bug, count, error)
