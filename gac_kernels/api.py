"""Public functions: check the arguments, choose the backend and run it.

Notation: N tokens, V vocabulary size, H hidden size, B padded rows, T row length, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import backends, checks, ops, reference
from .autograd import (
    FusedLinearLoss,
    FusedLoss,
    LinearLogprobs,
    LossTask,
    TokenLogprobs,
    loss_output,
)
from .backends import reference as reference_backend
from .contract import MORE_OUTPUTS, LossOutput, LossSpec
from .inputs import BatchInputs
from .linear import NeedsGrad, Scaling
from .projection import GemmOptions
from .sketch import HeadSketch
from .tokens import with_factors


def fused_gac_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor,
    is_demo: Tensor,
    *,
    mu: float | Tensor = 0.5,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
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
            with the "shaped" weight.
        is_demo: bool [B]; packed: [S]. True for a demonstration, False for a rollout. With the
            shape of targets, it gives one role per token, e.g. for a rollout whose prefix is a
            demonstration; the tokens of each role in a sequence then count as a sequence of their
            own.
        mu: weight of the demonstrations, in [0, 1]. A 0-d tensor avoids a host synchronization.
            Under torch.compile, pass a tensor: every new number triggers a recompilation.
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
    checks.rows("logits", logits, targets)
    inputs = BatchInputs(
        *(targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens),
        *(rollout_norm, demo_norm, weights, rollout_logps),
    )
    checks.batch(logits, inputs, spec)
    scaling = fold_scaling(spec.temperature, logit_scale, softcap)
    if torch.compiler.is_compiling():
        options, operands = GemmOptions(logits.dtype), (logits, None, None)
        return ops.fused_loss(operands, inputs, spec, moments, scaling, backend, options)
    chosen = backends.choose(backend, logits.device, logits.dtype)
    checks.values(targets, logits.shape[-1], cu_seqlens, weights)
    if chosen is reference_backend:
        keywords = {**inputs._asdict(), "logit_scale": logit_scale, "softcap": softcap}
        return reference.fused_gac_loss(logits, **keywords, spec=spec, moments=moments)
    spec = with_temperature(spec, scaling)
    with torch.no_grad():
        tokens = with_factors(chosen.plan(inputs, spec), inputs, spec)
    rows = logits if logits.dim() == 3 else logits[None]
    out = None
    if logits.requires_grad and torch.is_grad_enabled():
        out = (
            rows.detach() if overwrite and _has_distinct_elements(rows) else torch.empty_like(rows)
        )
    task = LossTask(tokens, spec, chosen, moments, softcap=scaling.softcap)
    flat = FusedLoss.apply(rows, task, out)
    return loss_output(flat, targets.shape)


def _has_distinct_elements(x: Tensor) -> bool:
    """Whether no two elements of `x` share memory, unlike in an expanded tensor."""
    span = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span += stride * (size - 1)
    return True


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
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
        temperature: divides the scaled logits; > 0.
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
    checks.rows("logits", logits, targets)
    scaling = fold_scaling(temperature, logit_scale, softcap)
    checks.outputs(outputs)
    if torch.compiler.is_compiling():
        options, operands = GemmOptions(logits.dtype), (logits, None, None)
        flat = ops.token_logprobs(operands, targets, scaling, bool(outputs), backend, options)
        return _named(flat, targets.shape, outputs)
    chosen = backends.choose(backend, logits.device, logits.dtype)
    checks.values(targets, logits.shape[-1])
    if chosen is reference_backend:
        return reference.token_logprobs(logits, targets, **scaling._asdict(), outputs=outputs)
    rows = logits if logits.dim() == 3 else logits[None]
    flat = TokenLogprobs.apply(rows, targets.reshape(-1), scaling, bool(outputs), chosen)
    return _named(flat, targets.shape, outputs)


def fold_scaling(temperature: float, logit_scale: float, softcap: float | None) -> Scaling:
    """Check the arguments, and fold the logit scale into the temperature and the softcap."""
    checks.positive("temperature", temperature)
    checks.logit_scaling(logit_scale, softcap)
    return Scaling(*reference.fold_scale(logit_scale, temperature, softcap))


def with_temperature(spec: LossSpec, scaling: Scaling) -> LossSpec:
    """The spec with the logit scale folded into its temperature."""
    if scaling.temperature == spec.temperature:
        return spec
    return replace(spec, temperature=scaling.temperature)


def _named(flat: Sequence[Tensor], shape: torch.Size, outputs: Sequence[str]) -> tuple[Tensor, ...]:
    """Select the requested outputs of a log-prob function and give them `shape`.

    `flat` has logps, entropy and all MORE_OUTPUTS.
    """
    logps, entropy, *extra = (x.view(shape) for x in flat)
    named = dict(zip(MORE_OUTPUTS, extra, strict=False))
    if "is_top1" in named:
        named["is_top1"] = named["is_top1"] != 0
    return logps, entropy, *(named[name] for name in outputs)


def fused_linear_gac_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    is_demo: Tensor,
    *,
    bias: Tensor | None = None,
    mu: float | Tensor = 0.5,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    moments: bool = True,
    overwrite: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
    chunk_bytes: int | None = None,
    sketch: HeadSketch | None = None,
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
        overwrite: accepted for symmetry; there are no logits to overwrite.
        chunk_bytes: memory for one chunk of logits and gradients; None: 128 MiB on a CPU, 1000
            MiB on a GPU.
        sketch: the projections for `LossOutput.sketch`, which is then computed even if no gradient
            is needed; None: no sketch. Sequences whose rows are skipped because mu is 0 or 1 get
            nan.

    Returns:
        The loss, differentiable once with respect to `hidden`, `weight` and `bias`, with its parts
        and statistics.
    """
    options = check_head(hidden, weight, targets, bias, chunk_bytes)
    inputs = BatchInputs(
        *(targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens),
        *(rollout_norm, demo_norm, weights, rollout_logps),
    )
    checks.batch(hidden, inputs, spec)
    checks.sketch(sketch)
    scaling = fold_scaling(spec.temperature, logit_scale, softcap)
    if torch.compiler.is_compiling():
        return ops.fused_loss(
            (hidden, weight, bias), inputs, spec, moments, scaling, backend, options, sketch
        )
    accum_dtype = reference.compute_dtype(options.dtype)
    chosen = backends.choose(backend, hidden.device, accum_dtype)
    checks.values(targets, weight.shape[0], cu_seqlens, weights)
    spec = with_temperature(spec, scaling)
    with torch.no_grad():
        tokens = with_factors(chosen.plan(inputs, spec, accum_dtype), inputs, spec)
    task = LossTask(tokens, spec, chosen, moments, sketch, scaling.softcap)
    needs = NeedsGrad.of(hidden, weight, bias)
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    flat = FusedLinearLoss.apply(flat_hidden, weight, bias, task, needs, options)
    return loss_output(flat, targets.shape)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = (),
    backend: str = "auto",
    chunk_bytes: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute `token_logprobs` of hidden @ weight.T + bias without materializing all logits.

    The backward pass recomputes the logits of the rows that receive a gradient: 8 N H V FLOPs in
    total.

    Arguments and results not listed here, and errors, are as in `token_logprobs`.

    Args:
        hidden: [B, T, H] or [N, H]; float32, bfloat16 or float16, rows of any stride.
        weight: [V, H], same dtype as hidden; under autocast, any float dtype except float64.
        targets: int64 [B, T] or [N]; -100 gives 0 and no gradient.
        bias: [V], or None.
        chunk_bytes: as in `fused_linear_gac_loss`.
    """
    options = check_head(hidden, weight, targets, bias, chunk_bytes)
    scaling = fold_scaling(temperature, logit_scale, softcap)
    checks.outputs(outputs)
    if torch.compiler.is_compiling():
        operands = hidden, weight, bias
        flat = ops.token_logprobs(operands, targets, scaling, bool(outputs), backend, options)
        return _named(flat, targets.shape, outputs)
    chosen = backends.choose(backend, hidden.device, reference.compute_dtype(options.dtype))
    checks.values(targets, weight.shape[0])
    flat_hidden, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    flat = LinearLogprobs.apply(
        flat_hidden, weight, bias, flat_targets, scaling, bool(outputs), chosen, options
    )
    return _named(flat, targets.shape, outputs)


def loss_from_logprobs(
    logps: Tensor,
    targets: Tensor,
    advantages: Tensor,
    is_demo: Tensor,
    *,
    mu: float | Tensor = 0.5,
    entropy: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    moments: bool = True,
) -> LossOutput:
    """Compute `fused_gac_loss` from log-probabilities instead of logits.

    Arguments not listed here, and errors, are as in `fused_gac_loss`.

    Args:
        logps: [B, T] or packed [N]: log-probability of each target under the policy at
            `spec.temperature`, which is not applied again. Any float dtype; the arithmetic is
            float32 or better. Not read where the target is -100.
        targets: int64, same shape as logps; only compared with -100.
        entropy: same shape as logps; entropy of each distribution in nats. None if unknown: an
            error if `spec.entropy_coef` is not 0, otherwise nan in the output.

    Returns:
        The loss, differentiable with respect to `logps` and `entropy`, with its parts and
        statistics.
    """
    checks.logprobs(logps, entropy, targets)
    inputs = BatchInputs(
        *(targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens),
        *(rollout_norm, demo_norm, weights, rollout_logps),
    )
    checks.batch(logps, inputs, spec)
    if spec.entropy_coef != 0 and entropy is None:
        raise ValueError(f"entropy is None: spec.entropy_coef={spec.entropy_coef!r} requires it")
    # torch.compile cannot trace code that reads tensor values
    if not torch.compiler.is_compiling():
        checks.values(targets, None, cu_seqlens, weights)
    return reference.loss_from_logprobs(logps, entropy, inputs, spec, moments)


def check_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk_bytes: int | None
) -> GemmOptions:
    """Check the LM head's inputs and return the options of its GEMMs.

    Their dtype is autocast's if autocast applies, otherwise that of `hidden`.
    """
    checks.rows("hidden", hidden, targets)
    autocast = hidden.dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type)
    checks.head(weight, bias, hidden, autocast)
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes!r}: use a number of bytes > 0, or None")
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    return GemmOptions(dtype, chunk_bytes)
