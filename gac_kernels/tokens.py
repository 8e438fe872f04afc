"""What the public functions pass on, and the conversions between a batch and its tokens.

Everything here is plain PyTorch of size N or S; work of size N x V is in the backends.
Notation: N tokens, S sequences, B padded rows, T row length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .contract import (
    FLOAT16_BOUND,
    IGNORE,
    DemoWeight,
    LossOutput,
    LossSpec,
    TokenMoments,
    compute_dtype,
)

# dtypes that the kernels support; C++ refers to them by index
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Scaling(NamedTuple):
    """The distribution of a row with logits x is softmax(softcap tanh(x / softcap) / temperature).

    Without a softcap it is softmax(x / temperature).
    """

    temperature: float | Tensor  # a tensor [N] has one for each row
    softcap: float | None = None

    def at(self, rows: Tensor | slice | None) -> Scaling:
        """The scaling of some rows; None: of all."""
        if rows is None or not isinstance(self.temperature, Tensor):
            return self
        return Scaling(self.temperature[rows], self.softcap)


class Upstream(NamedTuple):
    """What the gradient of the logits is computed from; float32 or better, [N] each."""

    lse: Tensor  # logsumexp of the row's scaled logits
    entropy: Tensor
    d_logps: Tensor  # upstream gradient of the log-prob; [N, K] for K targets per row
    d_entropy: Tensor  # upstream gradient of the entropy


class NeedsGrad(NamedTuple):
    """Which of rows, weight and bias need a gradient."""

    rows: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class Operands:
    """The rows of a call, and how their distributions are computed.

    A public function builds it once, after its checks. It passes unchanged to autograd or to an
    operator of `ops`, to the passes over the rows, and to the head's GEMMs.
    """

    rows: Tensor  # logits [B, T, V], or hidden states [N, H] if there is a weight
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]
    targets: Tensor  # int64 [N]; or K per row of a head, [N, K]
    temperatures: Tensor | None  # float32 or better, [N]; None: `temperature`
    temperature: float
    softcap: float | None  # None: no softcap
    backend: Any  # a module of `backends`, or an object with the same functions; in `ops`, its name
    dtype: torch.dtype  # of the logits, or that the operands of the head are rounded to
    accum_dtype: torch.dtype  # of the arithmetic: float32 or better
    chunk_bytes: int | None = None  # memory for logits and gradients; None: by device
    vocab_size: int | None = None  # determines the chunk sizes; None: rows of the weight
    wait: bool = True  # whether the host may wait for a GPU to learn which rows to skip

    # the fields that autograd saves
    TENSORS: ClassVar = ("rows", "weight", "bias", "targets", "temperatures")

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.rows, self.weight, self.bias, self.targets, self.temperatures

    def settings(self) -> dict[str, Any]:
        """The other fields, by name."""
        return {k: v for k, v in vars(self).items() if k not in self.TENSORS}

    @property
    def leaves(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What may need a gradient."""
        return self.rows, self.weight, self.bias

    @property
    def needs(self) -> NeedsGrad:
        """Which of the leaves require a gradient; none if gradients are disabled."""
        on = torch.is_grad_enabled()
        return NeedsGrad(*[on and x is not None and x.requires_grad for x in self.leaves])

    @property
    def vocabulary(self) -> int:
        return self.rows.shape[-1] if self.weight is None else self.weight.shape[0]

    @property
    def live(self) -> Tensor:
        """The rows with a loss, bool [N]."""
        first = self.targets if self.targets.dim() == 1 else self.targets[:, 0]
        return first != IGNORE

    def results(self, columns: int) -> Tensor:
        """A buffer for `stack_columns` of the rows' results, with `columns - 1` other columns."""
        if self.targets.dim() == 2:
            columns += self.targets.shape[1] - 1
        return self.rows.new_zeros(columns, len(self.targets), dtype=self.accum_dtype)

    def skips_rows(self, gemms: int) -> bool:
        """Whether a pass over a head leaves out the rows that need no GEMM.

        gemms: the number of GEMMs that a row may be left out of.
        """
        device = self.rows.device
        if self.weight is None or capturing(device):
            return False
        if device.type not in ASYNCHRONOUS:
            return True
        flops = 2 * gemms * self.rows.numel() * (self.vocab_size or len(self.weight))
        return self.wait and flops > WORTH_SKIPPING.get(self.dtype, 0)

    @property
    def scaling(self) -> Scaling:
        """The scaling of all rows."""
        per_row = self.temperatures
        return Scaling(self.temperature if per_row is None else per_row, self.softcap)


class BatchInputs(NamedTuple):
    """The inputs of a batch other than its logits; shapes and meaning as in `fused_gac_loss`.

    The operators of `ops` take these fields in this order.
    """

    targets: Tensor  # int64 [B, T] or [N]
    advantages: Tensor | None  # [B], [B, T], [S] or [N]; None: all are 0
    is_demo: Tensor | bool  # bool [B], [B, T], [S] or [N]; True or False: all sequences
    mu: float | Tensor = 0.5
    old_logps: Tensor | None = None  # like targets
    ref_logps: Tensor | None = None  # like targets
    cu_seqlens: Tensor | None = None  # int [S + 1]; None: padded
    rollout_norm: float | Tensor | None = None
    demo_norm: float | Tensor | None = None
    weights: Tensor | None = None  # [B], [B, T], [S] or [N]
    rollout_logps: Tensor | None = None  # like targets
    temperatures: Tensor | None = None  # [B], [B, T], [S] or [N]; None: the temperature of the spec
    teacher_logps: Tensor | None = None  # like targets, or [.., K] with `teacher_ids`
    teacher_ids: Tensor | None = None  # int64 [.., K]

    @property
    def sequences(self) -> int:
        return self.targets.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def all_roles(self) -> Tensor:
        """`is_demo` as a tensor."""
        if isinstance(self.is_demo, Tensor):
            return self.is_demo
        return torch.full((self.sequences,), self.is_demo, device=self.targets.device)

    def all_advantages(self) -> Tensor:
        """`advantages`; 0 for each sequence if there are none."""
        if self.advantages is not None:
            return self.advantages
        return torch.zeros(self.sequences, dtype=torch.float32, device=self.targets.device)

    def is_per_sequence(self, x: Tensor | bool | None) -> bool:
        """Whether `x` is [S], one value per sequence; if S == N, also True for values per token."""
        return not isinstance(x, Tensor) or x.shape == (self.sequences,)

    def per_token(self, x: Tensor, sequence: Tensor) -> Tensor:
        """[N] values of `x`, given per sequence or per token; sequence [N]: that of each token."""
        return x[sequence] if self.is_per_sequence(x) else x.reshape(-1)

    def to_targets_device(self) -> BatchInputs:
        """Detach all tensors and move them to the targets' device, without blocking the host.

        Tensors are moved before any conversion: a CUDA graph can capture copies from pinned memory
        only, and the result of a conversion on the CPU is not pinned.
        """
        device = self.targets.device

        def to_device(x: Any) -> Any:
            return x.detach().to(device, non_blocking=True) if isinstance(x, Tensor) else x

        return BatchInputs(*(to_device(x) for x in self))


# device types on which reading a count makes the host wait for the device
ASYNCHRONOUS = {"cuda"}
# To skip rows, the host of a GPU waits for their number once and launches some 30 small kernels.
# That cannot pay if the GEMMs of all rows take less than 0.3 ms: FLOPs, at 700 TFLOP/s in half
# precision and 45 TFLOP/s in float32, about those of an H200.
WORTH_SKIPPING = {torch.float16: 2.1e11, torch.bfloat16: 2.1e11, torch.float32: 1.35e10}
# Numbers of rows with a gradient and of rows with a loss, on the device until they are read.
Counts = Tensor | tuple[int, int]
# Some of the tokens: int64 [M], or consecutive ones.
Index = Tensor | slice


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured; counts cannot be read then, so no row is skipped."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # which need not be the current one
        return torch.cuda.is_current_stream_capturing()


class RowOrder(NamedTuple):
    """The order of a pass: rows with a gradient, forward-only rows, rows without a loss."""

    tokens: Tensor | None  # int64 [N]: the tokens in this order; None: that of the batch
    counts: Counts
    # bool [N]: the tokens with a loss, if the pass includes the others
    masked: Tensor | None = None

    @classmethod
    def whole(cls, live: Tensor, has_gradient: bool) -> RowOrder:
        """All rows as they are: nothing is counted, moved or waited for."""
        return cls(None, (len(live) * has_gradient, len(live)), masked=live)

    def tokens_of(self, rows: slice) -> Index:
        """The tokens of some rows of the pass."""
        return rows if self.tokens is None else self.tokens[rows]

    def select(self, x: Tensor) -> Tensor:
        """Move x [N, ...] to the order of the pass."""
        return x if self.tokens is None else x[self.tokens]

    def restore(self, results: Tensor) -> Tensor:
        """Move results [X, N] in this order to their tokens."""
        if self.tokens is None:
            return results
        return torch.empty_like(results).index_copy_(1, self.tokens, results)


def sort_tokens(live: Tensor, has_gradient: Tensor | None) -> RowOrder:
    """Order the tokens for a pass; nothing is read from a device.

    live: bool [N], the tokens with a loss.
    has_gradient: bool [N]; None: no row has one.
    """
    if capturing(live.device):
        return RowOrder.whole(live, has_gradient is not None)
    has_gradient = torch.zeros_like(live) if has_gradient is None else has_gradient
    group = 2 - live.to(torch.int8) - has_gradient.to(torch.int8)
    counts = torch.stack([has_gradient.sum(), live.sum()])
    return RowOrder(group.argsort(stable=True), counts)


def stack_columns(logps: Tensor, *others: Tensor, out: Tensor | None = None) -> Tensor:
    """Log-probs, [N] or [N, K], above other columns, [N] each: [1 + X, N] or [K + X, N]."""
    if logps.dim() == 1:
        return torch.stack([logps, *others], out=out)
    return torch.vstack([logps.T, *others], out=out)


def split_columns(stacked: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The columns of `stack_columns` for rows with these targets, [N] or [N, K]."""
    if targets.dim() == 1:
        return stacked.unbind()
    width = targets.shape[1]
    return stacked[:width].T.contiguous(), *stacked[width:].unbind()


def temperature_per_token(x: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """[N] detached values of x [B] or like targets [B, T] or [N]; 1 where there is no loss."""
    x = x.detach().to(targets.device, dtype)
    x = x if x.shape == targets.shape else x[:, None].expand(targets.shape)
    return torch.where(targets == IGNORE, 1, x).reshape(-1)


class Teacher(NamedTuple):
    """What a teacher says of N tokens: of the sampled ones, or of K tokens at each position."""

    logps: Tensor  # [N], or [N, K]; 0 where there is none. Their own dtype, float32 or better
    ids: Tensor | None  # int64 [N, K], each once; IGNORE where there is none
    scale: Tensor  # [N]: weight in the mixed loss, 0 except on rollout tokens

    def at(self, index: Tensor | slice) -> Teacher:
        """Select tokens; views if `index` is a slice."""
        ids = None if self.ids is None else self.ids[index]
        return Teacher(self.logps[index], ids, self.scale[index])


class Tokens(NamedTuple):
    """A batch as N tokens; float tensors are float32, or float64 for float64 inputs."""

    targets: Tensor  # int64 [N]; IGNORE = no loss
    live: Tensor  # bool [N]: has a loss
    demo: Tensor  # bool [N]: belongs to a demonstration
    advantages: Tensor  # [N]; 0 where it is not used
    old: Tensor | None  # [N]: log-probs of the sampling policy
    ref: Tensor | None  # [N]: log-probs of the reference policy
    weight: Tensor  # [N]: weight of the token's loss in its own term; 0 where there is no loss
    scale: Tensor  # [N]: weight in the mixed loss, i.e. `weight` times (1 - mu) or mu
    factor: Tensor | None  # [N]: multiplies the policy term, or a demonstration's loss
    rollout_logps: Tensor | None  # [N]: for the correction of current log-probs; nan: no correction
    temperature: Tensor | None  # [N]: of the token's logits; None: that of the spec
    sequence: Tensor  # int64 [N]: the token's sequence
    offsets: Tensor  # int64 [S + 1]: where each sequence starts
    lengths: Tensor  # int64 [S]: tokens with a loss
    rollout_lengths: Tensor  # int64 [S]: tokens with a loss that are not demonstrations
    mu: float | Tensor
    teacher: Teacher | None = None

    def per_sequence(self, x: Tensor) -> Tensor:
        """Sum over each sequence in a fixed order: [N] -> [S], or [N, X] -> [S, X]."""
        return torch.segment_reduce(x, "sum", offsets=self.offsets, axis=0, initial=0)

    def at(self, index: Tensor | slice) -> Tokens:
        """Select tokens, with only the fields that row kernels use; views if `index` is a slice."""
        columns = [None if x is None else x[index] for x in self[:11]]
        teacher = None if self.teacher is None else self.teacher.at(index)
        # mypy knows neither the length nor the types of an unpacked slice
        return Tokens(*columns, *self[11:-1], teacher)  # type: ignore[arg-type, call-arg]

    def spread(self, x: Tensor) -> Tensor:
        """Give each token its sequence's value: [S] -> [N]."""
        return x[self.sequence]

    @property
    def row_targets(self) -> Tensor:
        """The targets of the row functions: [N], or with a teacher's K tokens [N, K + 2].

        The last of these stands for the rest of the vocabulary.
        """
        if self.teacher is None or self.teacher.ids is None:
            return self.targets
        named = torch.cat([self.targets[:, None], self.teacher.ids], 1)
        return torch.nn.functional.pad(named, (0, 1), value=IGNORE)

    @property
    def rollout(self) -> Tensor:
        """bool [N]: rollout tokens with a loss."""
        return self.live & ~self.demo

    def rollout_sum(self, x: Tensor) -> Tensor:
        """Give each token the float64 sum of x [N] over its sequence's rollout tokens."""
        return self.spread(self.per_sequence(torch.where(self.rollout, x, 0).double()))

    def averaged(self, absolute: bool = False) -> Tokens:
        """The tokens with the mean of factor times advantage over each sequence as advantage.

        absolute: of its absolute value.
        """
        weighted = self.advantages if self.factor is None else self.advantages * self.factor
        mean = self.rollout_mean(weighted.abs() if absolute else weighted)
        return self._replace(
            advantages=torch.where(self.demo, self.advantages, mean),
            factor=None if self.factor is None else torch.where(self.demo, self.factor, 1),
        )

    def rollout_mean(self, x: Tensor) -> Tensor:
        """Like `rollout_sum`, but returns the mean, in the dtype of x."""
        lengths = self.spread(self.rollout_lengths).clamp(min=1)
        return (self.rollout_sum(x) / lengths).to(x.dtype)


# The columns that the row kernels read.
ROW_COLUMNS = ("targets", "demo", "advantages", "old", "ref", "scale", "factor", "rollout_logps")


class TokenTerms(NamedTuple):
    """Per-token results of a backend, [N], 0 where there is no loss."""

    logps: Tensor  # log-probability of the target; with a teacher's K tokens of `row_targets`
    entropy: Tensor  # of the whole distribution, nats
    loss: Tensor  # the token's loss before any weight
    kl: Tensor  # the KL estimator; 0 on demonstrations and without reference
    clipped: Tensor  # 1 where clipping removed the gradient


def plan(inputs: BatchInputs, spec: LossSpec, dtype: torch.dtype = torch.float32) -> Tokens:
    """Flatten a checked batch and compute each token's weight; `with_factors` adds the rest."""
    inputs = inputs.to_targets_device()
    targets, mu, cu_seqlens = inputs.targets, inputs.mu, inputs.cu_seqlens
    is_demo, advantages = inputs.all_roles(), inputs.all_advantages().to(dtype)
    device, flat = targets.device, targets.reshape(-1)
    index = torch.arange(len(flat), device=device)
    if cu_seqlens is None:
        rows, width = targets.shape
        offsets = torch.arange(rows + 1, device=device) * width
        sequence = index // max(width, 1)
    else:
        # a GPU's values are not checked: never index out of bounds
        offsets = cu_seqlens.to(torch.int64).clamp(0, len(flat)).cummax(0).values
        sequence = torch.searchsorted(offsets[1:], index, right=True).clamp(max=len(offsets) - 2)

    live, demo = flat != IGNORE, inputs.per_token(is_demo, sequence)
    if cu_seqlens is not None:  # tokens of no sequence have no loss
        inside = (index >= offsets[0]) & (index < offsets[-1])
        live, demo = live & inside, demo & inside
    rollout = live & ~demo
    roles = torch.stack([rollout, live & demo]).to(torch.int64)
    lengths = roles.new_zeros(2, len(offsets) - 1).index_add_(1, sequence, roles)  # exact
    in_term = torch.stack([~is_demo, is_demo])
    if not inputs.is_per_sequence(is_demo):
        # a sequence in which no token has a loss takes the role of its first position
        first = torch.nn.functional.pad(demo, (0, 1))[offsets[:-1]] & (offsets.diff() > 0)
        in_term = (lengths > 0) | (torch.stack([~first, first]) & (lengths.sum(0) == 0))

    advantages = inputs.per_token(advantages, sequence)
    uses_advantage = live if spec.demo_weight is DemoWeight.SHAPED else rollout
    old, ref = (
        None if x is None else torch.where(rollout, x.reshape(-1).to(dtype), 0)
        for x in (inputs.old_logps, inputs.ref_logps)
    )
    reductions = spec.rollout_reduction, spec.demo_reduction
    norms = inputs.rollout_norm, inputs.demo_norm
    rollout_weight, demo_weight = (
        _token_weight(*term, spec.max_tokens).to(dtype)[sequence]
        for term in zip(in_term, lengths, reductions, norms, strict=True)
    )
    weight = torch.where(live, torch.where(demo, demo_weight, rollout_weight), 0)
    mu = mu.to(dtype) if isinstance(mu, Tensor) else mu
    return Tokens(
        *(flat, live, demo, torch.where(uses_advantage, advantages, 0), old, ref, weight),
        scale=torch.where(demo, weight * mu, weight * (1 - mu)),
        factor=None,
        rollout_logps=None,
        temperature=None,
        sequence=sequence,
        offsets=offsets,
        lengths=lengths.sum(0),
        rollout_lengths=lengths[0],
        mu=mu,
    )


def with_factors(tokens: Tokens, inputs: BatchInputs, spec: LossSpec) -> Tokens:
    """Add the factor of each token's loss, its temperature and its teacher to a backend's plan.

    The factor is the caller's weight, times the correction if that is known, which takes
    `old_logps`. Otherwise the tokens keep `rollout_logps`, from which `token_factor` computes the
    correction later.
    """
    tokens = tokens._replace(teacher=_teacher(tokens, inputs, spec))
    if inputs.weights is None and inputs.temperatures is None and spec.correction == "none":
        return tokens
    inputs = inputs.to_targets_device()
    dtype, live = tokens.weight.dtype, tokens.live
    weights, temperatures = (
        None if x is None else inputs.per_token(x.to(dtype), tokens.sequence)
        for x in (inputs.weights, inputs.temperatures)
    )
    rollout = inputs.rollout_logps
    tokens = tokens._replace(
        factor=None if weights is None else torch.where(live, weights, 0),
        temperature=None if temperatures is None else torch.where(live, temperatures, 1),
        rollout_logps=None if rollout is None else rollout.reshape(-1).to(dtype),
    )
    if tokens.old is None or spec.masks_probabilities:
        return tokens
    return tokens._replace(factor=token_factor(tokens.old, tokens, spec), rollout_logps=None)


def _teacher(tokens: Tokens, inputs: BatchInputs, spec: LossSpec) -> Teacher | None:
    """The teacher of the rollout tokens."""
    if inputs.teacher_logps is None:
        return None
    logps, ids, rollout = inputs.teacher_logps.detach(), inputs.teacher_ids, tokens.rollout
    logps = logps.to(compute_dtype(logps.dtype))
    scale = torch.where(rollout, spec.teacher_coef * tokens.weight, 0)
    if ids is None:
        return Teacher(torch.where(rollout, logps.reshape(-1), 0), None, scale)
    width = ids.shape[-1]
    ids = ids.reshape(-1, width)
    ordered, order = ids.sort(dim=1, stable=True)
    repeated = torch.nn.functional.pad(ordered.diff(dim=1) == 0, (1, 0))
    absent = torch.zeros_like(repeated).scatter(1, order, repeated)
    absent |= ~rollout[:, None] | (ids[:, :1] == IGNORE)
    ids = ids.masked_fill(absent, IGNORE)
    return Teacher(logps.reshape(-1, width).masked_fill(ids == IGNORE, 0), ids, scale)


def token_factor(anchor: Tensor, tokens: Tokens, spec: LossSpec) -> Tensor | None:
    """[N] loss factors: `tokens.factor` times the correction of log-probs `anchor`."""
    if tokens.rollout_logps is None:
        return tokens.factor
    has_correction = tokens.rollout & ~tokens.rollout_logps.isnan()
    if spec.masks_probabilities:
        outside = outside_trust_region(anchor, tokens.rollout_logps, tokens.advantages, spec)
        kept = ~(outside & has_correction)
        return kept.to(anchor.dtype) if tokens.factor is None else tokens.factor * kept
    log_correction = torch.where(has_correction, anchor - tokens.rollout_logps, 0)
    if spec.correction.startswith("sequence"):
        log_correction = tokens.rollout_sum(log_correction)
    low = 0.0 if spec.correction_min is None else spec.correction_min
    high = math.inf if spec.correction_max is None else spec.correction_max
    correction = log_correction.exp()
    if spec.correction.endswith("truncate"):
        correction = correction.clamp(low, high)
    else:
        inside = (correction >= low) & (correction <= high)
        correction = torch.where(inside | correction.isnan(), correction, 0)
    correction = torch.where(tokens.demo, 1, correction.to(anchor.dtype))
    return correction if tokens.factor is None else tokens.factor * correction


def outside_trust_region(
    logps: Tensor, engine: Tensor, advantages: Tensor | float, spec: LossSpec
) -> Tensor:
    """Whether a mask by probabilities removes each token, bool [N].

    nan is not removed, so that it stays visible in the loss.
    """
    difference = logps.exp() - engine.exp()
    outside = difference.abs() > spec.max_probability_difference
    if spec.correction == "probability_mask_away":
        outside &= difference * advantages > 0
    return outside


def _token_weight(
    in_term: Tensor,  # bool [S]
    lengths: Tensor,  # [S]: tokens of the term
    reduction: str,
    norm: float | Tensor | None,
    max_tokens: float | None,
) -> Tensor:
    """Weight of each token of a sequence under a reduction, [S]; 0 if the denominator is 0."""
    if norm is None:
        norm = {"sequence": lengths > 0, "token": lengths}.get(reduction, in_term).sum()
    tokens: Any = {"sequence": lengths, "constant": max_tokens}.get(reduction, 1)
    denominator = torch.ones_like(lengths, dtype=torch.float64) * tokens * norm
    return torch.where(denominator == 0, 0, 1 / denominator)


def has_zero_gradient(tokens: Tokens, spec: LossSpec) -> Tensor:
    """Tokens whose gradient is known to be 0 before any logits are computed, bool [N]."""
    no_advantage, no_loss = tokens.advantages == 0, ~tokens.live | (tokens.scale == 0)
    if tokens.factor is not None:
        no_factor = tokens.factor == 0
        no_advantage, no_loss = no_advantage | no_factor, no_loss | (tokens.demo & no_factor)
    only_policy = spec.kl_coef == 0 and spec.entropy_coef == 0  # in the loss of a rollout
    shaped = spec.demo_weight is DemoWeight.SHAPED
    zero = no_loss | (no_advantage & torch.where(tokens.demo, shaped, only_policy))
    return zero if tokens.teacher is None else zero & (tokens.teacher.scale == 0)


def scale_for_float16(
    tokens: Tokens, spec: LossSpec, dtype: torch.dtype
) -> tuple[Tensor | None, Tokens]:
    """Loss scaling for float16: divide the token weights by inv_scale, a power of two.

    float16 cannot represent the gradients of a mean over many tokens. inv_scale is the power of two
    just above the largest weight, or a larger one if the gradient with respect to a logit would
    exceed 2^12 for a ratio of 1; the kernels bound it at 2^15 for any ratio (`bound_for_float16`).

    Returns (inv_scale, tokens with scaled weights); the gradients must be multiplied by inv_scale.
    Other dtypes need no scaling: inv_scale is None.
    """
    if dtype != torch.float16:
        return None, tokens
    weights = tokens.scale.abs()
    temperature = spec.temperature if tokens.temperature is None else tokens.temperature
    weighted_advantages = weights * tokens.advantages.abs() / temperature
    if tokens.factor is not None:
        weighted_advantages = torch.maximum(weights, weighted_advantages) * tokens.factor
    if tokens.rollout_logps is not None and not spec.masks_probabilities:
        weighted_advantages = weighted_advantages * min(spec.correction_max or 2**12, 2**12)
    bounds = torch.maximum(weights, weighted_advantages / 2**12)
    if tokens.ref is not None and tokens.old is not None and spec.kl_estimator == "k3":
        growth = (tokens.ref - tokens.old).clamp(max=math.log(2**24)).exp()
        weighted_kl = abs(spec.kl_coef) * weights * growth / temperature / 2**12
        bounds = torch.where(tokens.rollout & (weighted_kl > bounds), weighted_kl, bounds)
    teacher = tokens.teacher
    if teacher is not None:
        bounds = torch.maximum(bounds, teacher.scale.abs())
    inv_scale = power_above(bounds)
    if teacher is not None:
        teacher = teacher._replace(scale=teacher.scale / inv_scale)
    return inv_scale, tokens._replace(scale=tokens.scale / inv_scale, teacher=teacher)


def bound_for_float16(x: Tensor, temperature: float | Tensor) -> Tensor:
    """Bound derivatives of a scaled loss in log-probs or entropies, so that no logit's overflows.

    The token's gradient keeps its direction. Infinite derivatives and nan are kept: they belong to
    a loss that is not finite either.
    """
    bound = FLOAT16_BOUND * temperature
    return torch.where((x.abs() > bound) & x.isfinite(), x.sign() * bound, x)


def power_above(x: Tensor) -> Tensor:
    """The power of two just above the largest element of x >= 0; 1 if that is infinite or nan."""
    largest = torch.nn.functional.pad(x.flatten(), (0, 1)).max()
    power = torch.exp2(torch.frexp(largest).exponent.to(largest.dtype))
    return torch.where(largest.isfinite(), power, 1)


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> LossOutput:
    """Reduce token terms [N] to the outputs, with float64 sums in a fixed order.

    Only `loss` is differentiable; `logps` and `entropy` remain [N].
    """
    weighted_loss = (tokens.weight * terms.loss).double()
    terms = TokenTerms(*(x.detach() for x in terms))
    roles = torch.stack([tokens.rollout, tokens.live & tokens.demo])
    losses = torch.where(roles, weighted_loss, 0).sum(1)
    rollout_loss, demo_loss = losses
    shares = torch.stack([losses.new_zeros(()) + x for x in (1 - tokens.mu, tokens.mu)])
    loss = torch.where((shares == 0) & losses.isinf(), 0, shares * losses).sum()
    columns = *roles, terms.kl, terms.clipped, *torch.where(roles, terms.entropy, 0)
    totals = torch.stack(columns).sum(1, dtype=torch.float64)
    if tokens.ref is None:
        totals[2].fill_(math.nan)
    dtype = terms.loss.dtype
    return LossOutput(
        loss=loss.to(dtype),
        rollout_loss=rollout_loss.detach().to(dtype),
        demo_loss=demo_loss.detach().to(dtype),
        kl=(totals[2] / totals[0]).to(dtype),
        clip_fraction=(totals[3] / totals[0].clamp(min=1)).to(dtype),
        logps=terms.logps,
        entropy=terms.entropy,
        moments=_moments(tokens, terms, totals) if moments else None,
    )


def with_teacher_loss(
    out: LossOutput, tokens: Tokens, losses: Tensor, spec: LossSpec
) -> LossOutput:
    """Add the teacher's term to a reduced loss; losses [N], of which the loss is differentiable."""
    weighted = torch.where(tokens.rollout, tokens.weight * losses, 0)
    teacher_loss = weighted.sum(dtype=torch.float64).to(losses.dtype)
    loss = out.loss
    if spec.teacher_coef != 0:
        loss = loss + spec.teacher_coef * teacher_loss
    return out._replace(loss=loss, teacher_loss=teacher_loss.detach())


def _moments(tokens: Tokens, terms: TokenTerms, totals: Tensor) -> TokenMoments:
    """Compute the TokenMoments of a batch from its terms and totals."""
    logps, rollouts = terms.logps.double(), tokens.rollout_lengths > 0
    n, length = rollouts.sum(dtype=torch.float64), tokens.rollout_lengths.double()
    weight = torch.where(tokens.rollout, 1 / tokens.spread(length), 0)
    p = logps.exp()
    values = torch.stack([p * (1 - p), tokens.advantages.double()])  # s and r
    values = torch.where(tokens.rollout, values, 0)
    mean = values @ weight / n.clamp(min=1)
    centered = values - mean[:, None]
    (ss, sr), (_, rr) = (weight * centered) @ centered.T
    columns = torch.where(tokens.demo, logps, 0), weight * values[1]
    demo_logps, rollout_mean = tokens.per_sequence(torch.stack(columns, 1)).T
    between = torch.where(rollouts, rollout_mean - mean[1], 0).square().sum()
    demo_lengths = tokens.lengths - tokens.rollout_lengths
    nll = torch.where(demo_lengths > 0, -demo_logps / demo_lengths, -math.inf)
    return TokenMoments(torch.stack([n, *mean, ss, rr, sr, between]), nll, totals)
