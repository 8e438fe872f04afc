"""Public functions: check the arguments, and run the operator or the autograd function.

Notation: N tokens, V vocabulary size, H hidden size, B padded rows, T row length, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import checks, loss, ops, reference
from .candidates import with_candidates
from .contract import (
    DivergenceOutput,
    LossOutput,
    LossSpec,
    TokenLossOutput,
)
from .divergence import DivergenceSpec, divergence_loss
from .loss import Fused, TokenLogprobs
from .tokens import Operands


def fused_gac_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor | None = None,
    is_demo: Tensor | None = None,
    *,
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
    temperatures: Tensor | None = None,
    moments: bool = True,
    overwrite: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> LossOutput:
    """Compute the mixed loss (1 - mu) rollout_loss + mu demo_loss of a batch, and its statistics.

    Each sequence is a rollout or a demonstration, as given by `is_demo`. A batch is padded, [B, T],
    or packed: S concatenated sequences, N tokens in total, delimited by `cu_seqlens`.

    Args:
        logits: [B, T, V], or packed [N, V]; float32, bfloat16 or float16, rows of any stride.
        targets: int64 [B, T], or packed [N]: the token that each row of logits predicts; -100 to
            ignore the position.
        advantages: [B] or [B, T]; packed: [S] or [N]. Used for rollouts, and for demonstrations
            with the "shaped" weight. None: every token is a demonstration.
        is_demo: bool [B]; packed: [S]. True for a demonstration, False for a rollout. With the
            shape of targets, it gives one role per token, e.g. for a rollout whose prefix is a
            demonstration; the tokens of each role in a sequence then count as a sequence of their
            own. None: every token is a rollout if there are advantages.
        mu: weight of the demonstrations, in [0, 1]; required with both advantages and `is_demo`,
            otherwise None gives the only term the weight 1. A 0-d tensor avoids a host
            synchronization. Under torch.compile, pass a tensor: every new number triggers a
            recompilation.
        old_logps: same shape as targets; log-probabilities under the policy that sampled the
            rollouts, None if that is the policy being trained.
        ref_logps: same shape as targets; log-probabilities under the reference policy, required if
            `spec.kl_coef` is not 0.
        cu_seqlens: int32 [S + 1]: where each packed sequence starts, and where the last one ends.
        spec: clip, KL, entropy, demonstration weight, reductions, temperature.
        rollout_norm: denominator of the rollout term, counted over all micro-batches and ranks;
            None: counted over this batch.
        demo_norm: the same for the demonstration term.
        weights: float >= 0, [B] or [B, T]; packed: [S] or [N]. Factors of the policy term of
            rollout tokens and of the loss of demonstration tokens, not differentiated. They affect
            no denominator, KL, entropy or statistic.
        rollout_logps: same shape as targets; log-probabilities from the engine that sampled the
            rollouts, required by `spec.correction`. nan: no correction for that token.
        teacher_logps: same shape as targets; log-probabilities of the same tokens under a teacher,
            at the same temperature, required if `spec.teacher_coef` is not 0. They are read for
            rollouts.
        temperatures: float > 0, [B] or [B, T]; packed: [S] or [N]. Replaces `spec.temperature`.
        moments: False skips the statistics.
        overwrite: store the gradient in the logits' memory, which destroys the logits. No effect on
            tensors whose rows share memory (such as expanded ones), or under torch.compile, which
            plans its own memory.
        logit_scale: factor of the logits, as in `token_logprobs`.
        softcap: bound of the logits, as in `token_logprobs`.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The loss, differentiable once with respect to `logits`, with its parts and statistics.

    Raises:
        TypeError: an argument of the wrong type or dtype; the message names it.
        ValueError: an invalid shape or value; the message names the argument.
        RuntimeError: the chosen backend cannot run here; the message says why.

    Source:
        The paper's equations 1 to 9; GRPO, arXiv 2402.03300; CHORD, arXiv 2508.11408.
    """
    checks.row_tensor("logits", logits, targets)
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
        temperatures=temperatures,
    )
    checks.batch_inputs(logits, inputs, spec)
    scaled_inputs, scaled_spec = checks.scaled(inputs, spec, logits, None, logit_scale)
    op = checks.operands(
        logits,
        None,
        None,
        targets,
        temperature=spec.temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
        inputs=inputs,
    )
    if torch.compiler.is_compiling():
        return ops.fused_loss(op, scaled_inputs, scaled_spec, moments=moments)
    outputs: list[Any] = []
    compute = partial(
        loss.fused_loss,
        op,
        scaled_inputs,
        scaled_spec,
        op.needs,
        moments=moments,
        overwrite=overwrite,
    )
    total = Fused.apply(*op.leaves, op, compute, outputs)
    return outputs[0]._replace(loss=total)


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = (),
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Compute the log-probability of each target and the entropy of each distribution.

    The distribution is the softmax of `logit_scale * logits / temperature`, or, with a softcap, of
    `softcap * tanh(logit_scale * logits / softcap) / temperature`.

    Args:
        logits: [B, T, V] or [N, V]; float32, bfloat16 or float16, rows of any stride.
        targets: int64 [B, T] or [N]; -100 gives 0 and no gradient.
        temperature: divides the scaled logits; > 0. A tensor, [B] or like targets, gives each
            sequence or token its own; it is not differentiated.
        logit_scale: factor of the logits, as in Cohere and Granite; > 0.
        softcap: bound of the scaled logits, as in Gemma 2; None: no bound. Infinite logits are not
            capped: -inf still masks a vocabulary entry.
        outputs: further outputs, computed in the same pass: "log_sum_sq_probs" (log of the sum of
            squared probabilities), "mean_logits" (mean of the scaled logits) and "is_top1" (bool:
            the target is the first of the largest logits).
        backend: "auto", "reference", "triton" or "native".

    Returns:
        `(logps, entropy, *outputs)`, shaped like `targets`: logps and entropy (in nats) are float32
        and differentiable, the further outputs are not; they are 0 where the target is -100.

    Raises:
        TypeError, ValueError, RuntimeError: as for `fused_gac_loss`.
    """
    checks.row_tensor("logits", logits, targets)
    checks.outputs(outputs)
    op = checks.operands(
        logits,
        None,
        None,
        targets,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
    )
    return _logprobs(op, targets, outputs)


def _logprobs(op: Operands, targets: Tensor, outputs: Sequence[str]) -> tuple[Tensor, ...]:
    """Compute the results of a log-prob function, shaped like `targets` or its tokens."""
    more_outputs = len(outputs) > 0
    if torch.compiler.is_compiling():
        logps, entropy, *extra = ops.token_logprobs(op, more_outputs=more_outputs)
    else:
        logps, entropy, *extra = TokenLogprobs.apply(*op.leaves, op, more_outputs)
    flat = entropy, *reference.select_outputs(extra, outputs)
    first = targets if logps.dim() == 1 else targets[..., 0]
    return logps.view(targets.shape), *(x.view(first.shape) for x in flat)


def fused_linear_gac_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor | None = None,
    is_demo: Tensor | None = None,
    *,
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
    overwrite: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
    chunk_bytes: int | None = None,
) -> LossOutput:
    """Compute `fused_gac_loss` of hidden @ weight.T + bias without materializing all logits.

    The gradients are computed in the forward pass, chunk by chunk: 6 N H V FLOPs in total. This
    becomes 8 N H V if the loss depends on sums of current log-probs over a sequence: with
    `spec.importance_sampling_level="sequence"` and `old_logps`, `use_bias_correction_kl` or a
    correction, and with a "sequence" correction without `old_logps`. Rows without a loss are
    skipped, rows whose gradient is known to be 0 need only the forward GEMM, and a frozen weight
    needs no weight-gradient GEMM. Under autocast the operands are rounded to its dtype; gradients
    of float32 weights are float32. The weight must not be sharded: under FSDP, call this inside the
    module's forward.

    Arguments not listed here, and errors, are as in `fused_gac_loss`.

    Args:
        hidden: [B, T, H], or packed [N, H]; float32, bfloat16 or float16, rows of any stride.
        weight: [V, H], same dtype as hidden; under autocast, any float dtype except float64.
        bias: [V], or None.
        teacher_logps: as in `fused_gac_loss`, or [B, T, K] or [N, K] with `teacher_ids`.
        teacher_ids: int64 [B, T, K] or [N, K]; K different tokens at each position, such as the
            teacher's likeliest, for a `spec.teacher_loss` of "forward_kl" or "reverse_kl", at the
            same cost. -100: fewer than K tokens; as the first of a token: it has no teacher.
        overwrite: accepted for symmetry; there are no logits to overwrite.
        chunk_bytes: most memory for one chunk of logits and gradients, of which a CPU uses half if
            that is as fast; None: 128 MiB on a CPU; on a GPU 1000 MiB, or less if less is free. If
            it cannot be allocated, the call is tried again with less, with a warning.

    Returns:
        The loss, differentiable once with respect to `hidden`, `weight` and `bias`, with its parts
        and statistics.
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
    scaled_inputs, scaled_spec = checks.scaled(inputs, spec, hidden, weight, logit_scale)
    op = checks.operands(
        hidden,
        weight,
        bias,
        targets,
        temperature=spec.temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
        chunk_bytes=chunk_bytes,
        inputs=inputs,
    )
    if torch.compiler.is_compiling():
        return ops.fused_loss(op, scaled_inputs, scaled_spec, moments=moments)
    outputs: list[Any] = []
    compute = partial(loss.fused_loss, op, scaled_inputs, scaled_spec, op.needs, moments=moments)
    total = Fused.apply(*op.leaves, op, compute, outputs)
    return outputs[0]._replace(loss=total)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = (),
    backend: str = "auto",
    chunk_bytes: int | None = None,
    wait: bool = True,
) -> tuple[Tensor, ...]:
    """Compute `token_logprobs` of hidden @ weight.T + bias without materializing all logits.

    The backward pass recomputes the logits of the rows that receive a gradient: 8 N H V FLOPs in
    total.

    Arguments and results not listed here, and errors, are as in `token_logprobs`.

    Args:
        hidden: [B, T, H] or [N, H]; float32, bfloat16 or float16, rows of any stride.
        weight: [V, H], same dtype as hidden; under autocast, any float dtype except float64.
        targets: int64 [B, T] or [N]; -100 gives 0 and no gradient. Or K targets per token,
            [B, T, K] or [N, K], at the same cost: `logps` then has their shape, and the other
            results are per token. A token whose first target is -100 has no loss; a later -100
            means fewer than K targets. Under torch.compile, K targets break the graph once.
        bias: [V], or None.
        chunk_bytes: as in `fused_linear_gac_loss`.
        wait: False computes all rows, also those without a target or a gradient, so that the host
            never waits for a GPU to learn their number. No effect on a CPU, under torch.compile,
            and on a GPU if the GEMMs are too small for skipping to pay.
    """
    checks.head_rows(hidden, targets)
    checks.outputs(outputs)
    operands = partial(
        checks.operands,
        hidden,
        weight,
        bias,
        targets,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
        chunk_bytes=chunk_bytes,
        wait=wait,
    )
    if checks.has_candidates(hidden, targets):
        return _candidate_logprobs(operands, targets, outputs)
    return _logprobs(operands(), targets, outputs)


@torch._disable_dynamo  # unlike torch.compiler.disable, imports no compiler until it is called
def _candidate_logprobs(
    operands: Callable[[], Operands], targets: Tensor, outputs: Sequence[str]
) -> tuple[Tensor, ...]:
    """`_logprobs` of K targets per token, for which there is no operator."""
    return _logprobs(with_candidates(operands()), targets, outputs)


@torch._disable_dynamo  # unlike torch.compiler.disable, imports no compiler until it is called
def fused_linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: Callable[..., Tensor],
    *inputs: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = (),
    chunk_bytes: int | None = None,
    backend: str = "auto",
) -> TokenLossOutput:
    """Compute your own loss of each token, and its gradients, without materializing all logits.

    The loss of a token may depend on its log-probability, its entropy and your own tensors. Its
    derivatives are computed by autograd in the forward pass, block by block, so the total is
    6 N H V FLOPs as for `fused_linear_gac_loss`. Rows whose derivatives are 0 need only the forward
    GEMM; on a GPU, the host waits once per chunk to find them, and in float16 once per block for
    the size of the derivatives. A loss that needs sums over a sequence uses
    `linear_token_logprobs`, at 8 N H V. Under torch.compile, the call breaks the graph once,
    because your function runs eagerly.

    Arguments and errors not listed here are as in `fused_linear_gac_loss` and
    `linear_token_logprobs`.

    Args:
        token_loss: called as `token_loss(logps, entropy, *inputs, *outputs)` with the M tokens of a
            block that have a target; returns their losses, [M]. `logps` and `entropy` are float32
            (float64 for float64 operands) and differentiable; the others are detached. It must not
            couple tokens of different sequences or depend on which tokens share a block, and no
            gradient flows to tensors that it captures.
        targets: int64 [B, T] or [N], -100 for no loss. Or K targets per token, [B, T, K] or [N, K],
            at the same cost: `token_loss` sees `logps` [M, K], e.g. of a teacher's K likeliest
            tokens. A token whose first target is -100 has no loss; a later -100 means fewer than K
            targets: its log-prob is 0 without gradient.
        inputs: tensors of any dtype, each like targets, cut to the same tokens; with K targets,
            [.., K] or one number per token.

    Returns:
        `TokenLossOutput(loss, losses, logps, entropy, *outputs)`: `loss` is the sum of the losses,
        which you divide by a count of your choice; the others are like targets and detached.

    Raises:
        ValueError: one of `inputs` has another shape or requires a gradient, or `token_loss`
            returns another shape.
    """
    first = checks.head_rows(hidden, targets)
    checks.outputs(outputs)
    checks.token_inputs(token_loss, inputs, targets, first)
    op = checks.operands(
        hidden,
        weight,
        bias,
        targets,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
        chunk_bytes=chunk_bytes,
    )
    op = with_candidates(op)
    flat_inputs = [x.reshape(len(op.rows), *x.shape[first.dim() :]) for x in inputs]
    compute = partial(loss.token_loss, op, token_loss, flat_inputs, outputs, op.needs)
    others: list[Any] = []
    total = Fused.apply(*op.leaves, op, compute, others)
    values = [total, *(x.view(*first.shape, *x.shape[1:]) for x in others)]
    return TokenLossOutput.named(values, outputs)


def loss_from_logprobs(
    logps: Tensor,
    targets: Tensor,
    advantages: Tensor | None = None,
    is_demo: Tensor | None = None,
    *,
    mu: float | Tensor | None = None,
    entropy: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    teacher_logps: Tensor | None = None,
    moments: bool = True,
) -> LossOutput:
    """Compute `fused_gac_loss` from log-probabilities instead of logits.

    Arguments not listed here, and errors, are as in `fused_gac_loss`.

    Args:
        logps: [B, T] or packed [N]: log-probability of each target under the policy at
            `spec.temperature`, which is not applied again. Any float dtype; the arithmetic is
            float32 or better. Not read where the target is -100.
        targets: int64, same shape as logps: any token >= 0, which is not read, or -100 = no loss.
        entropy: same shape as logps; entropy of each distribution in nats. None if unknown: an
            error if `spec.entropy_coef` is not 0, otherwise nan in the output.

    Returns:
        The loss, differentiable with respect to `logps` and `entropy`, with its parts and
        statistics.
    """
    checks.logprobs(logps, entropy, targets)
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
    )
    checks.batch_inputs(logps, inputs, spec)
    if spec.entropy_coef != 0 and entropy is None:
        raise ValueError(f"entropy is None: spec.entropy_coef={spec.entropy_coef!r} requires it")
    # torch.compile cannot trace code that reads tensor values
    if not torch.compiler.is_compiling():
        checks.values(targets, None, inputs)
    return reference.loss_from_logprobs(logps, entropy, inputs, spec, moments)


@torch._disable_dynamo
def fused_linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    targets: Tensor | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    token_weights: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    chunk_bytes: int | None = None,
    backend: str = "auto",
) -> DivergenceOutput:
    """Compute a divergence between a student's and a teacher's distributions of each token.

    The logits of both models are computed block by block and never materialized. With the student's
    probabilities q and the teacher's p, over the whole vocabulary:

    - "forward_kl": KL(p, q) = sum p log(p / q);
    - "reverse_kl": KL(q, p) = sum q log(q / p);
    - "jsd": beta KL(p, m) + (1 - beta) KL(q, m), with m = (1 - beta) q + beta p.

    The gradients are computed in the forward pass: 6 N H V + 2 N H_t V FLOPs in total, and
    2 N H V + 2 N H_t V for tokens of weight 0. Under torch.compile, the call breaks the graph once.

    Arguments and errors not listed here are as in `linear_token_logprobs`.

    Args:
        hidden: [B, T, H] or [N, H]; the student's hidden states.
        weight: [V, H]; the student's head.
        teacher_hidden: [B, T, H_t] or [N, H_t]; not differentiated. Its dtype may differ from that
            of `hidden`.
        teacher_weight: [V, H_t]; the teacher's head, with the student's vocabulary.
        targets: int64 [B, T] or [N]; tokens whose target is -100 have no loss. The other values are
            only checked. None: every token has a loss.
        divergence: "forward_kl", "reverse_kl" or "jsd".
        beta: share of the teacher in the mixture of "jsd"; in (0, 1).
        token_weights: float [B, T] or [N], finite: factors of the tokens' divergences in `loss`,
            not differentiated; None: 1.
        temperature: divides the scaled logits of both models.
        bias, teacher_bias: [V], or None.
        logit_scale, softcap: of the student's logits.
        teacher_logit_scale, teacher_softcap: of the teacher's logits.

    Returns:
        `DivergenceOutput(loss, losses, entropy)`: `loss` is the sum of token_weights * losses,
        differentiable once with respect to `hidden`, `weight` and `bias`.

    Raises:
        TypeError, ValueError, RuntimeError: as for `linear_token_logprobs`.

    Source:
        Generalized Jensen-Shannon divergence as in GKD, arXiv 2306.13649, equation 1.
    """
    if targets is None:
        checks.tensor("hidden", hidden)
        targets = hidden.new_zeros(hidden.shape[:-1], dtype=torch.int64)
    checks.row_tensor("hidden", hidden, targets)
    checks.teacher_hidden(teacher_hidden, hidden)
    checks.divergence(divergence, beta)
    checks.token_weights(token_weights, targets)
    op = checks.operands(
        hidden,
        weight,
        bias,
        targets,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
        chunk_bytes=chunk_bytes,
    )
    try:
        teacher = checks.operands(
            teacher_hidden,
            teacher_weight,
            teacher_bias,
            targets,
            temperature=temperature,
            logit_scale=teacher_logit_scale,
            softcap=teacher_softcap,
            backend=backend,
            vocabulary=op.vocabulary,
        )
    except (TypeError, ValueError) as error:  # the message starts with the argument's name
        raise type(error)(f"teacher_{error}") from None
    if teacher.vocabulary != op.vocabulary:
        raise ValueError(
            f"teacher_weight has {teacher.vocabulary} rows, weight has {op.vocabulary}: the models "
            "need the same vocabulary; cut the rows that pad the longer one"
        )
    flat = None
    if token_weights is not None:
        flat = token_weights.detach().to(op.accum_dtype).reshape(-1)
    outputs: list[Any] = []
    spec = DivergenceSpec(divergence, beta)
    compute = partial(divergence_loss, op, teacher, spec, flat, op.needs)
    total = Fused.apply(*op.leaves, op, compute, outputs)
    return DivergenceOutput(total, *(x.view(targets.shape) for x in outputs))
