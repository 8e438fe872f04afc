"""`FusedAsyncGRPOTrainer`: TRL's asynchronous GRPO with our loss, in one pass without logits."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOTrainer

from gac_kernels import LossOutput, fused_linear_gac_loss
from gac_kernels.contract import IGNORE

from .head import (
    HeadInputs,
    HeadOutputs,
    head_override,
    installed,
    loss_spec,
    times,
    with_gradient,
)


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
        tokens_per_rank = times(inputs["global_n_tokens"][0], 1 / self.accelerator.num_processes)
        norm = tokens_per_rank.clamp(min=1) * self.current_gradient_accumulation_steps
        scored: list[Tensor] = []  # bool: whether each position of the packed row has a label
        surrogate: list[Tensor] = []

        def head(head_inputs: HeadInputs) -> HeadOutputs:
            hidden, count = head_inputs.hidden, len(head_inputs.hidden)
            # [1, M]: the loss's terms, then as many as another rank has more
            columns = inputs["token_index"], inputs["advantages"], inputs["old_log_probs"]
            index, advantages, old_logps = (x if count else x[:, :0] for x in columns)
            absent, compact = index < 0, count != scored[0].numel()
            # TRL passes only positions with a label, or all; an index of -1 is the last one
            positions = (scored[0].flatten().cumsum(0) - 1)[index] if compact else index
            self.rollout_out = out = fused_linear_gac_loss(
                hidden[positions],  # completions with the same beginning share its positions
                head_inputs.weight,
                head_inputs.targets[positions].masked_fill(absent, IGNORE),
                advantages,
                bias=head_inputs.bias,
                softcap=head_inputs.softcap,
                logit_scale=head_inputs.logit_scale,
                old_logps=old_logps,
                rollout_norm=norm,
                spec=loss_spec(
                    clip_low=self.epsilon_low,
                    clip_high=self.epsilon_high,
                    rollout_reduction="token",
                    temperature=head_inputs.temperature,
                ),
            )
            places = positions.masked_fill(absent, count)
            logps, entropy = (
                x.new_zeros(count + 1).index_put((places,), x.detach())[:count]
                for x in (out.logps, out.entropy)
            )
            labeled = None if compact else scored[0].sum().clamp(min=1)
            return HeadOutputs(with_gradient(logps, out.loss, labeled), entropy)

        def forward(**model_inputs: Any) -> Any:
            scored.append(model_inputs["shift_labels"] != IGNORE)
            outputs = model(**model_inputs)
            # through the model's output, because FSDP2 and DDP watch its gradient
            surrogate.append(outputs.log_probs.sum())
            outputs.log_probs = outputs.log_probs.detach()
            return outputs

        with installed(), head_override(head):
            loss = super().compute_loss(forward, inputs, *args, **keywords)
        return with_gradient(loss, surrogate[0])
