"""Adaptive mixing in TRL: `GACTrainer` is a `GRPOTrainer` that also learns from demonstrations.

loss = (1 - mu) * GRPOTrainer's own loss + mu * the demonstrations' loss, where mu moves after each
optimiser step. Works with TRL 1.9 to 1.16; docs/integrations/trl.md says what is refused.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import ProcessorMixin
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from gac.control.controller import ControllerConfig
from gac.data.rows import Batch, Row, collate
from gac.methods import Method
from gac.mixer import Mixer
from gac.model import Head, attach_head
from gac_kernels import LossOutput, LossSpec, loss_from_logprobs

from .demonstrations import check_columns, demo_norm, row_of, share, tokenized

if TYPE_CHECKING:
    from typing import Any as Trainer  # a mixin has what it is mixed into
else:
    Trainer = object

logger = logging.getLogger(__name__)


class GACMixin(Trainer):
    """Put it before GRPOTrainer, or a subclass of it, in the bases of a trainer.

    Args, beside the trainer's own:
        demo_dataset: a Dataset with prompt and completion (texts or messages), or messages.
        demo_batch: demonstrations of each optimiser step, over all processes.
        controller: a ControllerConfig or a method, see `gac.Mixer`; None = GAC's defaults.

    Logs gac/mu, gac/mu_star, gac/alpha, gac/prior, gac/rollout_loss, gac/demo_loss,
    gac/sft_variance, gac/rl_variance, gac/disagreement and, where there is a reference, gac/kl.
    Raises ValueError for options of the trainer that the mixture does not support.
    """

    def __init__(
        self,
        *args: Any,
        demo_dataset: Dataset,
        demo_batch: int,
        controller: ControllerConfig | Method | None = None,
        **keywords: Any,
    ) -> None:
        if not isinstance(demo_dataset, Dataset):
            raise TypeError(f"demo_dataset is a {type(demo_dataset).__name__}: use a Dataset")
        check_columns("demo_dataset", demo_dataset.column_names)
        super().__init__(*args, **keywords)
        _refuse(self)
        self.mixer = Mixer(
            controller, rows=len(demo_dataset), batch=demo_batch, seed=self.args.seed
        )
        template = {"tools": getattr(self, "tools", None) or None,
                    "chat_template": getattr(self, "chat_template", None),
                    **(getattr(self, "chat_template_kwargs", None) or {})}  # fmt: skip
        with self.accelerator.main_process_first():
            self._demos = tokenized(demo_dataset, "demo_dataset", self.processing_class, template)
        attach_head(_base_model(self))
        self._drawn: list[Row] | None = None  # the demonstrations of the step under way
        self._micro_batch = 0  # its micro-batches so far
        self._scored: tuple[Tensor, Tensor] | None = None  # the rollouts' log-probs and entropy
        if self.beta == 0:
            logger.warning(
                "beta=0.0: there is no reference model, so no KL is known and alpha stays as it "
                "is; beta=1e-30 measures the KL and moves nothing"
            )

    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **keywords)
        if torch.is_grad_enabled():  # the policy's; old and reference log-probs need no gradient
            self._scored = found[0].detach(), found[1].detach()
        return found

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if "pixel_values" in inputs:
            raise ValueError("the prompts have images: GACTrainer learns from texts only")
        own = super()._compute_loss(model, inputs)
        if not self.model.training:  # an evaluation is the trainer's own
            return own
        if self._drawn is None:
            numbers = self.mixer.draw()
            self._drawn = [row_of(row) for row in self._demos.select(numbers)]
            self._micro_batch = 0
        self.mixer.observe(self._rollout_moments(inputs))
        loss = self.mixer.rollouts(own) + self.mixer.demos(self._demo_loss(model))
        self._micro_batch += 1
        if self.accelerator.sync_gradients:
            for name, value in self.mixer.close().items():
                self._metrics["train"][f"gac/{name}"].append(value)
            self._drawn = None
        return loss

    def _rollout_moments(self, inputs: dict[str, Any]) -> Any:
        """What the controller wants to know of this micro-batch's rollouts."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        advantages = inputs["advantages"]
        if advantages.dim() == 2:
            advantages = advantages.expand(mask.shape)
        assert self._scored is not None
        (logps, entropy), self._scored = self._scored, None
        return loss_from_logprobs(
            logps,
            inputs["completion_ids"].masked_fill(mask == 0, -100),
            advantages,
            torch.zeros(len(mask), dtype=torch.bool),
            entropy=entropy,
            ref_logps=inputs.get("ref_per_token_logps"),
        ).moments

    def _demo_loss(self, model: torch.nn.Module) -> Tensor:
        """The demonstrations' loss on this rank and micro-batch; sums and ranks' means add up."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        slots = ranks * self.current_gradient_accumulation_steps
        first = self._micro_batch * ranks
        assert self._drawn is not None
        if first >= len(self._drawn):  # on no rank: all skip the forward together
            return torch.zeros((), device=self.accelerator.device)
        # a rank without a demonstration forwards one token without loss: sharded weights need all
        batch = collate(
            share(self._drawn, first + rank, slots), self._pad_token, self.accelerator.device
        )
        spec = self.mixer.spec
        score = functools.partial(_score, batch, spec, demo_norm(self._drawn, spec, ranks))
        out = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, request=score)
        self.mixer.observe(out.moments)
        return out.loss

    @property
    def _pad_token(self) -> int:
        tokenizer = self.processing_class
        return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.mixer.save(Path(self._get_output_dir(trial=trial)) / folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.mixer.load(checkpoint)


class GACTrainer(GACMixin, GRPOTrainer):
    """GRPOTrainer with demonstrations at a weight that adapts; see GACMixin."""


def _score(batch: Batch, spec: LossSpec, norm: float, head: Head) -> LossOutput:
    """The demonstrations' term from hidden states, inside the model's own forward."""
    if (
        head.hidden is not None
        and head.weight is not None
        and not torch.is_autocast_enabled(head.hidden.device.type)
    ):
        # cast_lm_head_to_fp32 keeps the head wider than the hidden states
        head = replace(head, hidden=head.hidden.to(head.weight.dtype))
    return head.loss(
        batch.targets, batch.advantages, batch.is_demo, mu=1.0, spec=spec, demo_norm=norm
    )


def _base_model(trainer: Any) -> Any:
    """The transformers model under accelerate's and peft's wraps."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _refuse(trainer: Any) -> None:
    """Raise ValueError for what would be left out of the mixture or weighted wrongly."""
    args, accelerator = trainer.args, trainer.accelerator
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    parallel = getattr(accelerator, "parallelism_config", None)
    adapters = getattr(trainer.model, "peft_config", {}).values()
    checkpointing = args.gradient_checkpointing_kwargs or {}
    refused = {
        "processing_class": (isinstance(trainer.processing_class, ProcessorMixin),
                             "images are not supported: use a text model"),
        "use_liger_kernel": (getattr(trainer, "use_liger_kernel", False),
                             "Liger's loss gives no log-probabilities: set it to False"),
        "router_aux_loss_coef": (getattr(trainer, "aux_loss_enabled", False),
                                 "the router loss has no share in the mixture: set it to 0"),
        "deepspeed": (plugin is not None and plugin.zero_stage == 3,
                      "ZeRO-3 hides the head's weight: use ZeRO-2 or FSDP2"),
        "parallelism_config": (parallel is not None and parallel.non_data_parallel_size > 1,
                               "tensor, context and sequence parallelism are not supported"),
        "peft_config": (any(adapter.is_prompt_learning for adapter in adapters),
                        "virtual tokens shift the demonstrations: use LoRA"),
        "torch_compile": (args.torch_compile, "it is not supported: set it to False"),
        "gradient_checkpointing_kwargs": (
            args.gradient_checkpointing and checkpointing.get("use_reentrant", False),
            "reentrant checkpointing allows one forward per backward: set use_reentrant to False",
        ),
    }  # fmt: skip
    for name, (present, use) in refused.items():
        if present:
            raise ValueError(f"GACTrainer refuses {name}: {use}")
