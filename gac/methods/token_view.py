"""What a method's own token loss sees of the tokens of a batch.

Notation: N tokens, S sequences, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gac.types import Head
from gac_kernels import LossSpec
from gac_kernels.tokens import Tokens


class TokenView(NamedTuple):
    """Input of a method's token loss: one value per token, 0 for tokens without a loss."""

    logps: Tensor
    """[N] log-probabilities of the targets, differentiable."""
    entropy: Tensor
    """[N] entropies, nats, detached."""
    batch: Tokens
    """Per-token targets, advantages, `demo`, `old`, `ref`; per-sequence `lengths`."""
    spec: LossSpec
    head: Head
    """The policy's last layer."""
    reference: Head | None
    """The reference policy's last layer, if `Loss.reference` is set."""
    policy_loss: Tensor
    """[N] policy-gradient loss of the rollout tokens, with the clip and the ratio of `spec`."""
    teacher: Tensor | None = None
    """[N] log-probs of the policy that sees the demonstration, nan without one; see
    `Sampling.teacher`."""
    units: Tensor | None = None
    """int64 [S] on the CPU, equal for the sequences of one prompt."""

    def sequence_mean(self, x: Tensor) -> Tensor:
        """[N] -> [S]: the mean over each sequence's tokens, differentiable; 0 for an empty one."""
        return self.batch.per_sequence(x) / self.batch.lengths.clamp(min=1)

    def vocabulary_kl(self, forward: bool, chunk: int = 1024) -> Tensor:
        """[N] KL over the full vocabulary between policy p and reference q, in nats.

        forward: KL(q || p) if true, else KL(p || q).
        chunk: number of tokens whose logits are materialized at a time; the backward pass
            recomputes them.
        """
        assert self.reference is not None  # `Loss.reference` is set
        index = self.batch.live.nonzero().flatten()
        out = self.logps.new_zeros(len(self.logps))
        for part in index.split(chunk):
            arguments = self.head, self.reference, part, self.spec.temperature, forward
            out = out.index_add(0, part, checkpoint(_chunk_kl, *arguments, use_reentrant=False))
        return out


def _chunk_kl(
    head: Head, reference: Head, index: Tensor, temperature: float, forward: bool
) -> Tensor:
    """[M] KL of the tokens at `index` [M]; see `TokenView.vocabulary_kl`."""
    logits = (_logits(side, index) for side in (head, reference))
    p, q = ((x / temperature).log_softmax(-1) for x in logits)
    q = q.detach()
    return ((q.exp() * (q - p)) if forward else (p.exp() * (p - q))).sum(-1)


def _logits(head: Head, index: Tensor) -> Tensor:
    """[M, V] float32 logits of the tokens at `index` [M]."""
    if head.logits is not None:
        return head.logits.flatten(0, 1)[index].float()
    assert head.hidden is not None
    assert head.weight is not None
    rows = head.hidden.flatten(0, 1)[index]
    logits = torch.nn.functional.linear(rows, head.weight.to(rows.dtype), head.bias).float()
    return head.scaled(logits)
