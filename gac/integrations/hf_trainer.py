"""What every trainer built on transformers' Trainer and TRL's GRPO needs around a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gac.mixer import Mixer

from .rollouts import rollout_moments

if TYPE_CHECKING:
    from typing import Any as Trainer  # a mixin has what it is mixed into
else:
    Trainer = object


class StepMixin(Trainer):
    """Keeps the demonstrations of the optimiser step under way, the log and the checkpoints."""

    mixer: Mixer
    _drawn: Any = None  # the demonstrations of the step under way
    _micro_batch = 0  # its micro-batches so far
    _scored: tuple[Tensor, Tensor | None] | None = None  # the rollouts' log-probs and entropy

    def begin_step(self, pick: Callable[[list[int]], Sequence[Any]]) -> None:
        """Draw the step's demonstrations in its first micro-batch; `pick` turns numbers to rows."""
        if self._drawn is None:
            self._drawn, self._micro_batch = pick(self.mixer.draw()), 0

    def own_share(self) -> Sequence[Any] | None:
        """This rank's demonstrations in this micro-batch; None where no rank has any.

        The empty list still wants a forward: sharded weights need every rank.
        """
        assert self._drawn is not None
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = self._micro_batch * ranks
        if first >= len(self._drawn):
            return None
        return self._drawn[first + rank :: ranks * self.current_gradient_accumulation_steps]

    def end_micro_batch(self) -> None:
        """Close the step with its last micro-batch, and log it."""
        self._micro_batch += 1
        if self.accelerator.sync_gradients:
            for name, value in self.mixer.close().items():
                self._metrics["train"][f"gac/{name}"].append(value)
            self._drawn = None

    def observe_rollouts(self, mask: Tensor, advantages: Tensor, ref: Tensor | None) -> None:
        """Tell the mixer of the rollouts whose loss was just computed; see `rollout_moments`."""
        assert self._scored is not None
        (logps, entropy), self._scored = self._scored, None
        self.mixer.observe(rollout_moments(logps, mask, advantages, entropy=entropy, ref_logps=ref))

    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **keywords)
        if torch.is_grad_enabled():  # the policy's; old and reference log-probs need no gradient
            self._scored = found[:2]
        return found

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.mixer.save(Path(self._get_output_dir(trial=trial)) / folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        # swift can take the weights alone from a checkpoint, and starts anew otherwise
        if checkpoint is not None and not getattr(self.args, "resume_only_model", False):
            self.mixer.load(checkpoint)


def base_model(trainer: Any) -> Any:
    """The transformers model under accelerate's and peft's wraps."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refused(trainer: Any) -> dict[str, tuple[bool, str]]:
    """Options of transformers and accelerate that no mixture supports: whether set, and a way."""
    args, accelerator = trainer.args, trainer.accelerator
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    parallel = getattr(accelerator, "parallelism_config", None)
    adapters = (getattr(trainer.model, "peft_config", None) or {}).values()
    checkpointing = args.gradient_checkpointing_kwargs or {}
    return {
        "deepspeed": (
            plugin is not None and plugin.zero_stage == 3,
            "ZeRO-3 hides the head's weight: use ZeRO-2 or FSDP2",
        ),
        "parallelism_config": (
            parallel is not None and parallel.non_data_parallel_size > 1,
            "tensor, context and sequence parallelism are not supported",
        ),
        "peft_config": (
            any(adapter.is_prompt_learning for adapter in adapters),
            "virtual tokens shift the demonstrations: use LoRA",
        ),
        "torch_compile": (args.torch_compile, "it is not supported: set it to False"),
        "gradient_checkpointing_kwargs": (
            args.gradient_checkpointing and checkpointing.get("use_reentrant", False),
            "reentrant checkpointing allows one forward per backward: set use_reentrant to False",
        ),
    }


def refuse(name: str, found: dict[str, tuple[bool, str]]) -> None:
    """Raise ValueError for the first option of `found` that is set; `name` is the trainer's."""
    for option, (is_set, use) in found.items():
        if is_set:
            raise ValueError(f"{name} refuses {option}: {use}")
