"""The fused loss with the vocabulary sharded over ranks: no rank holds [V, H] or [N, V].

Rank r holds consecutive rows of the weight and computes the corresponding columns of the logits.
For each block of tokens, the ranks gather three numbers per token, [3, M]: the logsumexp and the
entropy of their part of the distribution, and the target's logit. The gradient of the hidden
states, [N, H], is all-reduced once.

Notation: N tokens, M tokens of a chunk, V vocabulary size, H hidden size, R ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .contract import LossOutput, LossSpec
from .loss import Fused, fused_loss
from .shards import ShardedRows


def vocab_parallel_gac_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor | None = None,
    is_demo: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    mu: float | Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    temperatures: Tensor | None = None,
    moments: bool = True,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
) -> LossOutput:
    """Compute `fused_linear_gac_loss` of one batch that is replicated on every rank of `group`.

    Every rank gets the same output (do not sum the loss or its moments over `group`), the full
    gradient of `hidden` and the gradient of its own weight rows.

    Args:
        hidden: [B, T, H], or packed [N, H]; the same on every rank.
        weight: this rank's rows [V_r, H] of the weight, ranks in order; at least one row each,
            such as `full_weight.tensor_split(ranks)[rank]`.
        targets: int64 token ids in [0, V), with V the full vocabulary size; -100 = no loss.
        group: the ranks that share the vocabulary; None: all ranks.
        bias: this rank's entries [V_r], or None.
        chunk_bytes: memory for one chunk's logits on the rank with the most rows.

    Other arguments, errors and results are as in `fused_linear_gac_loss`.
    """
    checks.row_tensor("hidden", hidden, targets)
    inputs = checks.complete(
        targets,
        advantages,
        is_demo,
        spec=spec,
        mu=mu,
        old_logps=old_logps,
        ref_logps=ref_logps,
        cu_seqlens=cu_seqlens,
        rollout_norm=rollout_norm,
        demo_norm=demo_norm,
        weights=weights,
        rollout_logps=rollout_logps,
        teacher_logps=teacher_logps,
        teacher_ids=teacher_ids,
        temperatures=temperatures,
    )
    checks.batch_inputs(hidden, inputs, spec)
    checks.tensor("weight", weight)
    sizes = _sizes(weight, group)
    scaled_inputs, scaled_spec = checks.scaled(inputs, spec, hidden, weight, logit_scale)
    op = checks.operands(
        hidden,
        weight,
        bias,
        targets,
        temperature=spec.temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend="auto",
        chunk_bytes=chunk_bytes,
        inputs=inputs,
        vocabulary=sum(sizes),
    )
    # all ranks must use the same chunks, even if the weight rows are sharded unevenly
    backend = ShardedRows(sum(sizes[: dist.get_rank(group)]), sum(sizes), group, op.backend)
    needs, rows = op.needs, op.rows.view_as(op.rows)
    if needs.rows:  # all ranks add their parts of the gradient of this call
        rows.register_hook(lambda grad: backend.all_reduce(grad.contiguous()))
    op = replace(op, rows=rows, backend=backend, vocab_size=max(sizes))
    outputs: list[Any] = []
    compute = partial(fused_loss, op, scaled_inputs, scaled_spec, needs, moments=moments)
    total = Fused.apply(*op.leaves, op, compute, outputs)
    return outputs[0]._replace(loss=total)


def _sizes(weight: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Gather the number of weight rows of each rank."""
    local = torch.tensor([len(weight)], device=weight.device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return [int(n) for n in gathered]
