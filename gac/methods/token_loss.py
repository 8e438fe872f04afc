"""Custom per-token losses, for methods whose loss the fused kernels do not provide.

Reductions, metrics and sufficient statistics are those of the fused loss; a method only defines the
loss of a token. Notation: N tokens, S sequences, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gac.control.term_pair import TermPair
from gac.data.rows import Batch
from gac_kernels import LossOutput, LossSpec
from gac_kernels.inputs import BatchInputs
from gac_kernels.reference import loss_output
from gac_kernels.tokens import Tokens, TokenTerms, plan

if TYPE_CHECKING:
    from gac.models.causal_lm import Head  # needs transformers


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
    teacher: Tensor | None = None
    """[N] log-probs of the policy that sees the demonstration, nan without one; see
    `Sampling.teacher`."""
    units: Tensor | None = None
    """int64 [S] on the CPU, equal for the sequences of one prompt."""

    def sequence_mean(self, x: Tensor) -> Tensor:
        """[N] -> [S]: the mean over each sequence's tokens, differentiable; 0 for an empty one."""
        return self.batch.per_sequence(x) / self.batch.lengths.clamp(min=1)

    @property
    def log_ratio(self) -> Tensor:
        """[N] log-ratio to the sampling policy; on-policy it is 0 but still has a gradient."""
        old = self.logps.detach() if self.batch.old is None else self.batch.old
        return self.logps - old

    @property
    def policy_loss(self) -> Tensor:
        """[N] clipped policy-gradient loss of the rollout tokens."""
        ratio, advantage = self.log_ratio.exp(), self.batch.advantages
        low = 0.0 if self.spec.clip_low is None else 1 - self.spec.clip_low
        high = math.inf if self.spec.clip_high is None else 1 + self.spec.clip_high
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)

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


def custom_loss(
    token_loss: Callable[[TokenView], Tensor],
    head: Head,
    reference: Head | None,
    batch: Batch,
    mu: float,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    spec: LossSpec,
    norms: TermPair,
    teacher_logps: Tensor | None = None,
) -> LossOutput:
    """Like `Head.loss`, with `token_loss(TokenView) -> [N]` as the per-token loss."""
    targets = batch.targets
    flat, old, ref = batch.to_loss_layout(targets, old_logps, ref_logps)
    inputs = BatchInputs(
        flat,
        batch.advantages,
        batch.is_demo,
        mu,
        old,
        ref,
        cu_seqlens=batch.cu_seqlens,
        rollout_norm=norms.rollout,
        demo_norm=norms.demo,
    )
    tokens = plan(inputs, spec)
    logps, entropy = (x.reshape(-1) for x in head.logprobs(targets, spec.temperature))
    teacher = None if teacher_logps is None else teacher_logps.flatten()
    view = TokenView(logps, entropy.detach(), tokens, spec, head, reference, teacher, batch.units)
    loss = torch.where(tokens.live, token_loss(view), 0)
    log_ratio = torch.zeros_like(entropy) if tokens.ref is None else tokens.ref - logps.detach()
    kl = torch.where(tokens.live & ~tokens.demo, log_ratio.exp() - log_ratio - 1, 0)
    terms = TokenTerms(logps, entropy.detach(), loss, kl, torch.zeros_like(kl))
    return loss_output(tokens, terms, targets.shape)


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
    assert head.hidden is not None and head.weight is not None  # a head has either these or logits
    rows = head.hidden.flatten(0, 1)[index]
    logits = torch.nn.functional.linear(rows, head.weight.to(rows.dtype), head.bias).float()
    return head.scaled(logits)
