"""Custom per-token losses, for methods whose loss the fused kernels do not provide.

Reductions, metrics and sufficient statistics are those of the fused loss; a method only defines the
loss of a token. Notation: N tokens, S sequences, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gac.methods.token_view import TokenView
from gac.models.head import Head
from gac.rows import Batch
from gac.types import TermPair
from gac_kernels import LossOutput, LossSpec
from gac_kernels.contract import IGNORE
from gac_kernels.reference import Coupling, coupling, token_terms
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
    engine_logps: Tensor | None = None,
    per_token: bool = False,
    policy: bool = False,
) -> LossOutput:
    """Like `Head.loss`, with `token_loss(TokenView) -> [N]` as the per-token loss.

    The KL penalty and the entropy bonus of `spec` are added on rollout tokens, and the correction
    for `engine_logps` multiplies the method's loss there. With `per_token`, as in `Loss`, the
    gradient takes one pass over the logits instead of two, unless `spec` couples tokens; with
    `policy`, the tokens that the clip of `spec` removes are counted.
    """
    targets = batch.targets
    shape = targets.shape if batch.cu_seqlens is None else (-1,)
    given = old_logps, ref_logps, engine_logps
    old, ref, engine = (x if x is None else x.reshape(shape) for x in given)
    inputs = BatchInputs(
        targets.reshape(shape),
        batch.advantages,
        batch.is_demo,
        mu,
        old,
        ref,
        cu_seqlens=batch.cu_seqlens,
        rollout_logps=engine,
        rollout_norm=norms.rollout,
        demo_norm=norms.demo,
    )
    tokens = with_factors(plan(inputs, spec), inputs, spec)
    teacher = None if teacher_logps is None else teacher_logps.flatten()
    fixed = spec, head, reference, batch.units, policy
    if not per_token or head.logits is not None or coupling(tokens, spec) is not Coupling.NONE:
        logps, entropy = (x.reshape(-1) for x in head.logprobs(targets, spec.temperature))
        terms = _terms(token_loss, logps, entropy, tokens, teacher, *fixed)
        return reduce(tokens, terms, True).shaped(targets.shape)
    names = [name for name in COLUMNS if getattr(tokens, name) is not None]
    columns = [getattr(tokens, name) for name in names] + ([] if teacher is None else [teacher])

    def weighted_loss(logps: Tensor, entropy: Tensor, *columns: Tensor) -> Tensor:
        """[M] loss of the tokens of a block, with their weight in the mixed loss."""
        part = tokens._replace(**dict(zip(names, columns, strict=False)))
        seen = None if teacher is None else columns[-1]
        return part.scale * _terms(token_loss, logps, entropy, part, seen, *fixed).loss

    like_targets = (x.view(targets.shape) for x in columns)
    out = head.token_loss(targets, weighted_loss, *like_targets, temperature=spec.temperature)
    with torch.no_grad():
        logps, entropy = out.logps.flatten(), out.entropy.flatten()
        terms = _terms(token_loss, logps, entropy, tokens, teacher, *fixed)
    return reduce(tokens, terms, True).shaped(targets.shape, loss=out.loss, filter=out.filter)


def _terms(
    token_loss: Callable[[TokenView], Tensor],
    logps: Tensor,
    entropy: Tensor,
    tokens: Tokens,
    teacher: Tensor | None,
    spec: LossSpec,
    head: Head,
    reference: Head | None,
    units: Tensor | None,
    policy: bool,
) -> TokenTerms:
    """The terms of a custom loss, [N] each, differentiable in logps and entropy."""
    plain = tokens._replace(factor=None, rollout_logps=None)
    unpenalized = replace(spec, kl_coef=0.0, entropy_coef=0.0)
    own = token_terms(logps, entropy, plain, unpenalized)
    fixed = entropy.detach(), tokens, spec, head, reference
    loss = token_loss(TokenView(logps, *fixed, own.loss, teacher, units))
    factor = token_factor(logps.detach(), tokens, spec)
    if factor is not None:
        loss = torch.where(tokens.rollout, factor * loss, loss)
    # the terms of the fused loss for advantages of 0 are the penalties alone
    without_advantages = plain._replace(advantages=torch.zeros_like(tokens.advantages))
    penalties = token_terms(logps, entropy, without_advantages, spec)
    loss = loss + torch.where(tokens.rollout, penalties.loss, 0)
    loss = torch.where(tokens.live, loss, 0)
    clipped = own.clipped if policy else torch.zeros_like(loss)
    return TokenTerms(logps, entropy.detach(), loss, penalties.kl, clipped)


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
