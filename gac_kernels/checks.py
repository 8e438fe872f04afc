"""Argument checks: each error names the argument, the offending value and what to do.

`complete` and `operands` gather the arguments of a public function.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import backends
from .contract import (
    COMPUTE_DTYPES,
    IGNORE,
    MORE_OUTPUTS,
    TOP_K_LOSSES,
    DemoWeight,
    LossSpec,
)
from .divergence import DIVERGENCES
from .tokens import DTYPES, BatchInputs, Operands, temperature_per_token

MAX_LOGP = 0.01  # of a teacher: a log-probability that was rounded


def row_tensor(name: str, value: Tensor, targets: Tensor) -> None:
    """Check that `value` [..., X] is a float tensor with contiguous rows, one per target."""
    tensor(name, value, "float32, bfloat16 or float16", *DTYPES, torch.float64)
    width = "V" if name == "logits" else "H"
    if value.dim() not in (2, 3):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: use [B, T, {width}] or packed [N, {width}]"
        )
    if value.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: the last dimension is empty")
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        raise ValueError(
            f"{name} has strides {value.stride()}: the last dimension must be contiguous; "
            f"call .contiguous() first"
        )
    tensor("targets", targets, "int64", torch.int64)
    shape("targets", targets, value.shape[:-1])
    same_device("targets", targets, value)


def logprobs(logps: Tensor, entropy: Tensor | None, targets: Tensor) -> None:
    """Check that logps [B, T] or [N] and their entropies are float tensors shaped like targets."""
    tensor("targets", targets, "int64", torch.int64)
    if targets.dim() not in (1, 2):
        raise ValueError(f"targets has shape {tuple(targets.shape)}: use [B, T] or packed [N]")
    tensor("logps", logps)
    floats("logps", logps, targets, targets.shape)
    floats("entropy", entropy, targets, targets.shape)


def tensor(name: str, value: object, wanted: str = "", *dtypes: torch.dtype) -> None:
    """Check that `value` is a plain, unsharded tensor, and of one of these dtypes if any."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: use a tensor")
    # calling a DTensor's full_tensor() here would drop the gradient reduction
    if hasattr(value, "full_tensor"):
        raise TypeError(
            f"{name} is a {type(value).__name__}: use a plain tensor; under FSDP, call the loss "
            f"inside the module's forward, where parameters are gathered"
        )
    if dtypes and value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}: use {wanted}")


def shape(name: str, value: Tensor, *allowed: tuple[int, ...]) -> None:
    if tuple(value.shape) not in [tuple(a) for a in allowed]:
        wanted = " or ".join(str(list(a)) for a in allowed)
        raise ValueError(f"{name} has shape {list(value.shape)}: expected {wanted}")


def same_device(name: str, value: Tensor, other: Tensor, allow_cpu: bool = False) -> None:
    if value.device != other.device and not (allow_cpu and value.is_cpu):
        raise ValueError(f"{name} is on {value.device}: move it to {other.device}")


def head(weight: Tensor, bias: Tensor | None, hidden: Tensor, autocast: bool) -> None:
    """Check that weight [V, H] and bias [V] fit hidden [..., H]; dtypes may differ in autocast."""
    tensor("weight", weight)
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}: expected [V, {hidden.shape[-1]}] "
            f"for hidden of shape {list(hidden.shape)}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        tensor(name, value)
        aligned = autocast and value.is_floating_point() and value.dtype != torch.float64
        if value.dtype != hidden.dtype and not aligned:
            raise TypeError(
                f"{name} has dtype {value.dtype}: use {hidden.dtype}, the dtype of hidden, "
                f"or enable autocast"
            )
        same_device(name, value, hidden)
    if bias is not None:
        shape("bias", bias, (weight.shape[0],))


def batch_inputs(like: Tensor, inputs: BatchInputs, spec: LossSpec) -> None:
    """Check a batch and its spec without reading tensor values, except for temperatures."""
    if not isinstance(spec, LossSpec):
        raise TypeError(f"spec is a {type(spec).__name__}: use a LossSpec")
    sequences = _sequences(like, inputs.targets, inputs.cu_seqlens)
    tokens = tuple(inputs.targets.shape)
    given = tuple(getattr(inputs.advantages, "shape", ()))
    if inputs.cu_seqlens is not None and given == (sequences + 1,) != tokens:
        raise ValueError(
            f"cu_seqlens has {sequences + 1} entries, as many as advantages: for S sequences, give "
            "their S + 1 offsets, from 0 to N, instead of their lengths"
        )
    floats("advantages", inputs.advantages, like, (sequences,), tokens, allow_cpu=True)
    if isinstance(inputs.is_demo, Tensor):
        shape("is_demo", inputs.is_demo, (sequences,), tokens)
        same_device("is_demo", inputs.is_demo, like, allow_cpu=True)
    floats("weights", inputs.weights, like, (sequences,), tokens, allow_cpu=True)
    if inputs.temperatures is not None:
        temperature_tensor("temperatures", inputs.temperatures, inputs.targets, sequences)
    for name in ("old_logps", "ref_logps", "rollout_logps"):
        floats(name, getattr(inputs, name), inputs.targets, tokens)
    if spec.kl_coef != 0 and inputs.ref_logps is None:
        raise ValueError(f"ref_logps is None: spec.kl_coef={spec.kl_coef!r} requires it")
    if (spec.correction == "none") != (inputs.rollout_logps is None):
        raise ValueError(
            f"rollout_logps is None: spec.correction={spec.correction!r} requires it"
            if inputs.rollout_logps is None
            else "rollout_logps is given but spec.correction='none': set a correction or omit it"
        )
    teacher(inputs, spec)
    scalar("mu", inputs.mu, like, 0, 1)
    for name in ("rollout_norm", "demo_norm"):
        if (norm := getattr(inputs, name)) is not None:
            scalar(name, norm, like, 0, math.inf)


def teacher(inputs: BatchInputs, spec: LossSpec) -> None:
    """Check what a teacher says of the tokens, without reading values."""
    logps, ids = inputs.teacher_logps, inputs.teacher_ids
    tokens, loss = tuple(inputs.targets.shape), f"spec.teacher_loss={spec.teacher_loss!r}"
    top_k = spec.teacher_loss in TOP_K_LOSSES
    if logps is None:
        if ids is not None:
            raise ValueError("teacher_logps is None: teacher_ids requires their log-probabilities")
        if spec.teacher_coef != 0:
            raise ValueError(
                f"teacher_logps is None: spec.teacher_coef={spec.teacher_coef!r} requires it"
            )
        return
    if ids is None:
        if top_k:
            raise ValueError(f"teacher_ids is None: {loss} requires K tokens, [.., K]")
        floats("teacher_logps", logps, inputs.targets, tokens)
        return
    if not top_k:
        raise ValueError(
            f"teacher_ids is given but {loss} takes the sampled token: omit it, or use one of "
            f"{', '.join(TOP_K_LOSSES)}"
        )
    tensor("teacher_ids", ids, "int64", torch.int64)
    if ids.dim() != len(tokens) + 1 or ids.shape[:-1] != tokens or ids.shape[-1] == 0:
        wanted = ", ".join(str(n) for n in tokens)
        raise ValueError(
            f"teacher_ids has shape {list(ids.shape)}: expected [{wanted}, K] with K >= 1"
        )
    same_device("teacher_ids", ids, inputs.targets)
    floats("teacher_logps", logps, inputs.targets, tuple(ids.shape))


def _sequences(like: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> int:
    """Check the layout (padded or packed) and return the number of sequences."""
    if targets.dim() != 1:
        if cu_seqlens is not None:
            raise ValueError(
                f"cu_seqlens is given for padded targets of shape {list(targets.shape)}: "
                f"pass it only with packed targets [N]"
            )
        return targets.shape[0]
    if cu_seqlens is None:
        raise ValueError("cu_seqlens is None: the packed layout requires it")
    tensor("cu_seqlens", cu_seqlens, "int32", torch.int32, torch.int64)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}: expected [S + 1]")
    same_device("cu_seqlens", cu_seqlens, like, allow_cpu=True)
    return cu_seqlens.numel() - 1


def floats(
    name: str, value: Tensor | None, like: Tensor, *shapes: tuple[int, ...], allow_cpu: bool = False
) -> None:
    """Check that `value` is None or a float tensor of one of these shapes on the device of `like`.

    allow_cpu: it may be on a CPU, too.
    """
    if value is None:
        return
    tensor(name, value)
    if not value.is_floating_point():
        raise TypeError(f"{name} has dtype {value.dtype}: use a float dtype")
    shape(name, value, *shapes)
    same_device(name, value, like, allow_cpu)


def scalar(name: str, value: object, like: Tensor, low: float, high: float) -> None:
    """Check that `value` is a number in [low, high], or a 0-d tensor, whose value is not read."""
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"{name} has shape {list(value.shape)}: use a number or a 0-d tensor")
        if value.requires_grad:
            raise ValueError(f"{name} requires a gradient, which the loss has not: detach it")
        same_device(name, value, like, allow_cpu=True)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: use a number or a 0-d tensor")
    elif not low <= value <= high:
        raise ValueError(f"{name}={value!r}: use a number in [{low}, {high}]")


def positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: use a number")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: use a finite number > 0")


def temperature_tensor(name: str, value: Tensor, targets: Tensor, sequences: int) -> None:
    """Check a float tensor of temperatures > 0, one per sequence or like targets."""
    floats(name, value, targets, (sequences,), targets.shape, allow_cpu=True)
    if value.requires_grad:
        raise ValueError(f"{name} requires a gradient, which it cannot get: pass it detached")
    if not torch.compiler.is_compiling():
        in_range(name, value, targets)


def has_candidates(hidden: Tensor, targets: Tensor) -> bool:
    """Whether there are K targets per token: [B, T, K] for [B, T, H], or [N, K] for [N, H]."""
    return targets.dim() == hidden.dim()


def head_rows(hidden: Tensor, targets: Tensor) -> Tensor:
    """Check hidden states with one or K targets per token; return the first target of each."""
    tensor("hidden", hidden)
    tensor("targets", targets, "int64", torch.int64)
    first = targets
    if has_candidates(hidden, targets):
        if targets.shape[-1] == 0:
            raise ValueError(f"targets has shape {list(targets.shape)}: give at least one target")
        first = targets[..., 0]
    row_tensor("hidden", hidden, first)
    return first


def token_inputs(
    function: object, inputs: Sequence[Tensor], targets: Tensor, tokens: Tensor
) -> None:
    """Check the arguments of `fused_linear_token_loss` that concern the user's function.

    tokens: a tensor with one element per token, unlike targets [.., K].
    """
    if not callable(function):
        raise TypeError(f"token_loss is a {type(function).__name__}: use a function")
    for i, value in enumerate(inputs):
        tensor(f"inputs[{i}]", value)
        shape(f"inputs[{i}]", value, *dict.fromkeys((tuple(targets.shape), tuple(tokens.shape))))
        same_device(f"inputs[{i}]", value, targets)
        if value.requires_grad:
            raise ValueError(
                f"inputs[{i}] requires a gradient, which token_loss cannot give: pass it detached"
            )


def teacher_hidden(value: Tensor, hidden: Tensor) -> None:
    """Check the teacher's hidden states: any width and float dtype, otherwise as the student's."""
    tensor("teacher_hidden", value, "float32, bfloat16 or float16", *DTYPES, torch.float64)
    if value.shape[:-1] != hidden.shape[:-1] or value.dim() < 2 or value.shape[-1] == 0:
        wanted = ", ".join(str(n) for n in hidden.shape[:-1])
        raise ValueError(
            f"teacher_hidden has shape {list(value.shape)}: expected [{wanted}, H_t], as hidden has"
        )
    same_device("teacher_hidden", value, hidden)


def divergence(name: str, beta: float) -> None:
    """Check the divergence and the teacher's share in the mixture of "jsd"."""
    if name not in DIVERGENCES:
        raise ValueError(f"divergence={name!r}: use one of {', '.join(DIVERGENCES)}")
    positive("beta", beta)
    if beta >= 1:
        raise ValueError(
            f"beta={beta!r}: use a number in (0, 1); for the limits use divergence='forward_kl' "
            "(0) or 'reverse_kl' (1)"
        )


def token_weights(value: Tensor | None, targets: Tensor) -> None:
    """Check finite float weights like targets."""
    floats("token_weights", value, targets, tuple(targets.shape))
    if value is not None and _readable(value) and not value.isfinite().all():
        where = (~value.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"token_weights{where} = {value[tuple(where)].item()}: use finite numbers")


def outputs(names: Sequence[str]) -> None:
    """Check the requested outputs of a log-probability function."""
    for name in (names,) if isinstance(names, str) else names:
        if isinstance(names, str) or name not in MORE_OUTPUTS or names.count(name) > 1:
            raise ValueError(
                f"outputs={names!r}: use a tuple with any of {', '.join(MORE_OUTPUTS)}, each once"
            )


def _readable(x: Tensor | None) -> bool:
    """Whether values may be checked: on a CPU, or, if GAC_CHECK=1, anywhere."""
    return x is not None and (x.is_cpu or os.environ.get("GAC_CHECK") == "1")


def in_range(name: str, value: Tensor | None, targets: Tensor, zero: bool = False) -> None:
    """Check that values are finite and > 0 (or >= 0 if `zero`) where there is a loss."""
    if value is None or not _readable(value):
        return
    bad = ~((value >= 0 if zero else value > 0) & (value < math.inf))
    if value.shape == targets.shape and not zero:
        bad &= (targets != IGNORE).to(bad.device)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}{where} = {value[tuple(where)].item()}: use finite numbers >{'=' * zero} 0"
        )


def values(targets: Tensor, vocabulary: int | None, inputs: BatchInputs | None = None) -> None:
    """Check tensor values. On an accelerator, this is done only if GAC_CHECK=1."""
    cu_seqlens = None if inputs is None else inputs.cu_seqlens
    if inputs is not None:
        in_range("weights", inputs.weights, targets, zero=True)
        in_range("temperatures", inputs.temperatures, targets)
        teacher_values(inputs, vocabulary)
    if cu_seqlens is not None and _readable(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends != sorted(ends) or (ends[0], ends[-1]) != (0, targets.numel()):
            raise ValueError(
                f"cu_seqlens={ends}: use offsets that start at 0, never decrease, and end at "
                f"N = {targets.numel()}"
            )
    token_ids("targets", targets, vocabulary, "for no loss")


def token_ids(name: str, ids: Tensor, vocabulary: int | None, ignored: str) -> None:
    """Check that readable ids are in [0, V), or -100."""
    if not ids.numel() or not _readable(ids):
        return
    low, high = [x.item() for x in ids.aminmax()]
    limit = high + 1 if vocabulary is None else vocabulary
    if low >= 0 and high < limit:  # fast path: a single pass if every token has a loss
        return
    bad = ((ids < 0) | (ids >= limit)) & (ids != IGNORE)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}{where} = {ids[tuple(where)].item()}: use a token in "
            f"[0, {'V' if vocabulary is None else vocabulary}), or {IGNORE} {ignored}"
        )


def teacher_values(inputs: BatchInputs, vocabulary: int | None) -> None:
    """Check a teacher's readable tokens, and that it gives log-probabilities, not logits."""
    ids, logps = inputs.teacher_ids, inputs.teacher_logps
    if ids is None and logps is None:
        return
    given = inputs.targets != IGNORE
    if ids is not None:
        ids = ids.masked_fill(~given[..., None], IGNORE)
        token_ids("teacher_ids", ids, vocabulary, "for fewer than K tokens")
        given = ids != IGNORE
    if logps is not None and _readable(logps):
        bad = given & (logps > MAX_LOGP)
        if bad.any():
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"teacher_logps{where} = {logps[tuple(where)].item()}: use log-probabilities <= 0"
            )


def complete(
    targets: Tensor,
    advantages: Tensor | None = None,
    is_demo: Tensor | None = None,
    *,
    spec: object = None,
    mu: float | Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    temperatures: Tensor | None = None,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
) -> BatchInputs:
    """The batch, with the roles that omitted arguments imply; nothing is read from a device.

    Without advantages every token is a demonstration; without `is_demo` every token is a rollout,
    if there are advantages. The weight of the only term is then 1.

    Raises:
        ValueError: `mu` is missing and both terms may have tokens, or advantages are missing.
    """
    if is_demo is not None:
        tensor("is_demo", is_demo, "bool", torch.bool)
    if mu is None and advantages is not None and is_demo is not None:
        raise ValueError(
            "mu is None: a batch with advantages and is_demo needs the weight of its "
            "demonstrations, in [0, 1]; omit is_demo if all tokens are rollouts"
        )
    if advantages is None and teacher_logps is not None:
        raise ValueError(
            "advantages is None: without advantages every token is a demonstration, but a teacher "
            "teaches rollouts; pass advantages, which are 0 for distillation alone"
        )
    if advantages is None:
        has_rollouts = (
            is_demo is not None
            and is_demo.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not is_demo.all()
        )
        is_shaped = isinstance(spec, LossSpec) and spec.demo_weight is DemoWeight.SHAPED
        if has_rollouts or is_shaped:
            raise ValueError(
                "advantages is None: rollouts, and demonstrations with the weight 'shaped', "
                "require advantages"
            )
        # every token is a demonstration; the shape of the argument has still to be checked
        is_demo = None if is_demo is None else torch.ones_like(is_demo)
    return BatchInputs(
        targets=targets,
        advantages=advantages,
        is_demo=advantages is None if is_demo is None else is_demo,
        mu=float(advantages is None) if mu is None else mu,
        old_logps=old_logps,
        ref_logps=ref_logps,
        cu_seqlens=cu_seqlens,
        rollout_norm=rollout_norm,
        demo_norm=demo_norm,
        weights=weights,
        rollout_logps=rollout_logps,
        temperatures=temperatures,
        teacher_logps=teacher_logps,
        teacher_ids=teacher_ids,
    )


def gemm_dtype(rows: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of the logits, or that the operands of a head are rounded to."""
    if weight is None or not autocasts(rows):
        return rows.dtype
    return torch.get_autocast_dtype(rows.device.type)


def autocasts(rows: Tensor) -> bool:
    """Whether a GEMM of `rows` rounds its operands to autocast's dtype."""
    return rows.dtype != torch.float64 and torch.is_autocast_enabled(rows.device.type)


def scaled(
    inputs: BatchInputs, spec: LossSpec, rows: Tensor, weight: Tensor | None, logit_scale: float
) -> tuple[BatchInputs, LossSpec]:
    """The batch and the options of a loss, with temperatures that include the logit scale."""
    if logit_scale == 1:
        return inputs, spec
    positive("logit_scale", logit_scale)
    spec = replace(spec, temperature=spec.temperature / logit_scale)
    if inputs.temperatures is not None:
        device, accum_dtype = inputs.targets.device, COMPUTE_DTYPES[gemm_dtype(rows, weight)]
        temperatures = inputs.temperatures.to(device, non_blocking=True).to(accum_dtype)
        inputs = inputs._replace(temperatures=temperatures / logit_scale)
    return inputs, spec


def operands(
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    backend: str,
    chunk_bytes: int | None = None,
    wait: bool = True,
    inputs: BatchInputs | None = None,
    vocabulary: int | None = None,
) -> Operands:
    """Check the arguments that all functions share, and choose the backend.

    The logit scale is folded into the temperature and the softcap. The dtype of a head's GEMMs is
    autocast's if autocast applies, otherwise that of the hidden states.

    Args:
        targets: one per row; or K per row of a head, and a row whose first is IGNORE has no others.
        inputs: the batch of a loss, whose values are checked with the targets.
        vocabulary: upper limit of the targets; None: the rows of the weight, or the logits.
    """
    positive("logit_scale", logit_scale)
    if softcap is not None:
        positive("softcap", softcap)
        softcap = softcap / logit_scale
    dtype = gemm_dtype(rows, weight)
    several = weight is not None and has_candidates(rows, targets)
    first, flat_targets = targets, targets.reshape(-1)
    if several:
        first, ids = targets[..., 0], targets.detach().reshape(-1, targets.shape[-1])
        flat_targets = ids.masked_fill(ids[:, :1] == IGNORE, IGNORE)
    if weight is not None:
        head(weight, bias, rows, autocasts(rows))
        if chunk_bytes is not None and not (isinstance(chunk_bytes, int) and chunk_bytes > 0):
            raise ValueError(f"chunk_bytes={chunk_bytes!r}: use a whole number > 0, or None")
        rows = rows.reshape(-1, rows.shape[-1])
    else:  # a subclass that computes its values on demand does so here, with its gradient
        rows = rows[None] if rows.dim() == 2 else rows.view_as(rows)
    accum_dtype = COMPUTE_DTYPES[dtype]
    temperatures = None
    if isinstance(temperature, Tensor):
        temperature_tensor("temperature", temperature, first, first.shape[0])
        temperatures = temperature_per_token(temperature, first, accum_dtype) / logit_scale
        temperature = logit_scale
    positive("temperature", temperature)
    chosen: Any = backend
    if not torch.compiler.is_compiling():  # an operator does both at run time
        columns = rows.shape[-1] if weight is None else weight.shape[0]
        values(targets, vocabulary or columns, inputs)
        logits_dtype = dtype if weight is None else accum_dtype
        chosen = backends.select_backend(backend, rows.device, logits_dtype)
    return Operands(
        rows=rows,
        weight=weight,
        bias=bias,
        targets=flat_targets,
        temperatures=temperatures,
        temperature=temperature / logit_scale,
        softcap=softcap,
        backend=chosen,
        dtype=dtype,
        accum_dtype=accum_dtype,
        chunk_bytes=chunk_bytes,
        wait=wait,
    )
