"""`FusedAsyncGRPOTrainer`: TRL's asynchronous GRPO with our loss, in one pass without logits."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOTrainer

from gac_kernels import LossOutput, LossSpec, fused_linear_gac_loss

from .head import HeadInputs, HeadOutputs, head_override, installed


class FusedAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer whose loss is computed in one pass over the vocabulary.

    TRL computes its loss and metrics from detached log-probs, so their names and values are TRL's;
    the gradient comes from `fused_linear_gac_loss`.
    """

    rollout_out: LossOutput | None = None
    """Output of the fused loss of the last micro-batch; its rows are TRL's loss terms."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **keywords: Any) -> Any:
        """The loss of a micro-batch.

        Raises:
            ImportError: this TRL does not pack completions by their common prefixes.
        """
        if "token_index" not in inputs:
            raise ImportError(
                f"trl=={version('trl')}: FusedAsyncGRPOTrainer needs TRL 1.16 or later"
            )
        terms, ranks = inputs["token_index"] >= 0, self.accelerator.num_processes
        labeled = inputs["shift_labels"][inputs["attention_mask"].bool()] != -100
        surrogate: list[Tensor] = []

        def head(head_inputs: HeadInputs) -> HeadOutputs:
            hidden, index = head_inputs.hidden, inputs["token_index"][terms]
            if len(hidden) != len(labeled):  # TRL passes only positions with a label
                index = (labeled.cumsum(0) - 1)[index]
            self.rollout_out = out = fused_linear_gac_loss(
                hidden[index],  # completions with the same beginning share its positions
                head_inputs.weight,
                head_inputs.targets[index],
                inputs["advantages"][terms],
                None,
                bias=head_inputs.bias,
                softcap=head_inputs.softcap,
                logit_scale=head_inputs.logit_scale,
                old_logps=inputs["old_log_probs"][terms],
                cu_seqlens=torch.tensor([0, len(index)], dtype=torch.int32),
                rollout_norm=max(float(inputs["global_n_tokens"][0]) / ranks, 1.0)
                * self.current_gradient_accumulation_steps,
                spec=LossSpec(
                    clip_low=self.epsilon_low,
                    clip_high=self.epsilon_high,
                    rollout_reduction="token",
                    temperature=head_inputs.temperature,
                ),
            )
            logps, entropy = (
                x.new_zeros(len(hidden)).index_put((index,), x.detach())
                for x in (out.logps, out.entropy)
            )
            return HeadOutputs(logps + (out.loss - out.loss.detach()), entropy)

        def forward(**model_inputs: Any) -> Any:
            outputs = model(**model_inputs)
            # through the model's output, because FSDP2 and DDP watch its gradient
            surrogate.append(outputs.log_probs.sum() / labeled.sum().clamp(min=1))
            outputs.log_probs = outputs.log_probs.detach()
            return outputs

        with installed(), head_override(head):
            loss = super().compute_loss(forward, inputs, *args, **keywords)
        return loss + (surrogate[0] - surrogate[0].detach())
