"""Custom per-token losses, for methods whose loss the fused kernels do not provide.

Reductions, metrics and sufficient statistics are those of the fused loss; a method only defines the
loss of a token. Notation: N tokens, S sequences, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gac.methods.token_view import TokenView
from gac.models.head import Head
from gac.rows import Batch
from gac.types import TermPair
from gac_kernels import LossOutput, LossSpec
from gac_kernels.contract import IGNORE
from gac_kernels.loss import Coupling, coupling
from gac_kernels.reference import token_terms
from gac_kernels.tokens import (
    BatchInputs,
    Tokens,
    TokenTerms,
    plan,
    reduce,
    token_factor,
    with_factors,
)

COLUMNS = Tokens._fields[: Tokens._fields.index("sequence")]  # one value per token


class OtherLogps(NamedTuple):
    """Log-probs of a batch's targets under other policies, shaped like them; None: not measured."""

    old: Tensor | None = None
    """Under the policy that sampled the rollouts."""
    reference: Tensor | None = None
    """Under the frozen initial policy."""
    teacher: Tensor | None = None
    """Under the policy that sees the demonstration; nan without one."""
    engine: Tensor | None = None
    """From the engine that sampled the rollouts; nan for other tokens."""


UNKNOWN = OtherLogps()


@dataclass(frozen=True)
class CustomTerms:
    """The terms of a custom loss as a function of log-probs and entropies, [N] each."""

    token_loss: Callable[[TokenView], Tensor]
    spec: LossSpec
    head: Head
    reference: Head | None
    units: Tensor
    policy: bool

    def __call__(
        self, logps: Tensor, entropy: Tensor, tokens: Tokens, teacher: Tensor | None
    ) -> TokenTerms:
        """The terms of `tokens`, differentiable in `logps` and `entropy`."""
        plain = tokens._replace(factor=None, rollout_logps=None)
        unpenalized = replace(self.spec, kl_coef=0.0, entropy_coef=0.0)
        own = token_terms(logps, entropy, plain, unpenalized)
        view = TokenView(
            logps=logps,
            entropy=entropy.detach(),
            batch=tokens,
            spec=self.spec,
            head=self.head,
            reference=self.reference,
            policy_loss=own.loss,
            teacher=teacher,
            units=self.units,
        )
        loss = self.token_loss(view)
        factor = token_factor(logps.detach(), tokens, self.spec)
        if factor is not None:
            loss = torch.where(tokens.rollout, factor * loss, loss)
        # the terms of the fused loss for advantages of 0 are the penalties alone
        without_advantages = plain._replace(advantages=torch.zeros_like(tokens.advantages))
        penalties = token_terms(logps, entropy, without_advantages, self.spec)
        loss = loss + torch.where(tokens.rollout, penalties.loss, 0)
        loss = torch.where(tokens.live, loss, 0)
        clipped = own.clipped if self.policy else torch.zeros_like(loss)
        return TokenTerms(logps, entropy.detach(), loss, penalties.kl, clipped)


def custom_loss(
    token_loss: Callable[[TokenView], Tensor],
    head: Head,
    batch: Batch,
    *,
    mu: float,
    spec: LossSpec,
    norms: TermPair,
    logps: OtherLogps = UNKNOWN,
    reference: Head | None = None,
    per_token: bool = False,
    policy: bool = False,
) -> LossOutput:
    """Like `Head.loss`, with `token_loss(TokenView) -> [N]` as the per-token loss.

    The KL penalty and the entropy bonus of `spec` are added on rollout tokens, and the correction
    for `logps.engine` multiplies the method's loss there. With `per_token`, as in `Loss`, the
    gradient takes one pass over the logits instead of two, unless `spec` couples tokens; with
    `policy`, the tokens that the clip of `spec` removes are counted.
    """
    targets = batch.targets
    shape = targets.shape if batch.cu_seqlens is None else (-1,)

    def shaped(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(shape)

    inputs = BatchInputs(
        targets=targets.reshape(shape),
        advantages=batch.advantages,
        is_demo=batch.is_demo,
        mu=mu,
        old_logps=shaped(logps.old),
        ref_logps=shaped(logps.reference),
        cu_seqlens=batch.cu_seqlens,
        rollout_logps=shaped(logps.engine),
        rollout_norm=norms.rollout,
        demo_norm=norms.demo,
    )
    tokens = with_factors(plan(inputs, spec), inputs, spec)
    teacher = None if logps.teacher is None else logps.teacher.flatten()
    terms_of = CustomTerms(token_loss, spec, head, reference, units=batch.units, policy=policy)
    kind = coupling(
        spec,
        off_policy=tokens.old is not None,
        corrects_current=tokens.rollout_logps is not None,
    )
    if not per_token or head.logits is not None or kind is not Coupling.NONE:
        own, entropy = (x.reshape(-1) for x in head.logprobs(targets, spec.temperature))
        return reduce(tokens, terms_of(own, entropy, tokens, teacher), True).shaped(targets.shape)
    names = [name for name in COLUMNS if getattr(tokens, name) is not None]
    columns = [getattr(tokens, name) for name in names] + ([] if teacher is None else [teacher])

    def weighted_loss(own: Tensor, entropy: Tensor, *columns: Tensor) -> Tensor:
        """[M] loss of the tokens of a block, with their weight in the mixed loss."""
        named: dict[str, Any] = dict(zip(names, columns, strict=False))
        part = tokens._replace(**named)
        seen = None if teacher is None else columns[-1]
        return part.scale * terms_of(own, entropy, part, seen).loss

    like_targets = (x.view(targets.shape) for x in columns)
    out = head.token_loss(targets, weighted_loss, *like_targets, temperature=spec.temperature)
    with torch.no_grad():
        terms = terms_of(out.logps.flatten(), out.entropy.flatten(), tokens, teacher)
    return reduce(tokens, terms, True).shaped(targets.shape, loss=out.loss)


def with_k3(out: LossOutput, batch: Batch, ref_logps: Tensor) -> LossOutput:
    """Replace the KL in the statistics of a batch by the k3 estimator."""
    assert out.moments is not None  # requested by the trainer
    live = batch.targets != IGNORE
    lengths = live.shape[1] if batch.cu_seqlens is None else batch.cu_seqlens.diff()
    rollouts = ~batch.is_demo.to(live.device)
    rollout = live & rollouts.repeat_interleave(lengths, output_size=live.numel()).view_as(live)
    gap = torch.where(rollout, ref_logps.view_as(rollout) - out.logps.view_as(rollout), 0).double()
    totals = out.moments.totals.clone()
    totals[2] = (gap.exp() - gap - 1).sum()
    return out._replace(moments=replace(out.moments, totals=totals))
