"""The fused loss's types: options, outputs and sufficient statistics."""

from __future__ import annotations

import enum
import functools
import math
import struct
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch

IGNORE = -100  # a target with this value has no loss
# logp - old is clamped to this value, with zero gradient above it. Otherwise the loss could leave
# the range of float32 and become inf or nan; with the clamp, advantages up to 1e20 are safe.
MAX_LOG_RATIO = 40.0
FLOAT16_BOUND = 2.0**15  # of a float16 gradient with respect to a logit, before it is unscaled


# Dtype of the arithmetic on inputs of each dtype: float32 or better.
COMPUTE_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the arithmetic on inputs of `dtype`, which need not be one of the supported."""
    return COMPUTE_DTYPES.get(dtype, torch.float32)


class DemoWeight(enum.StrEnum):
    """The loss of a demonstration token with probability p.

    The first three are -w log p with a detached weight w; the last two are functions of p.
    """

    ONE = "one"
    """w = 1: plain cross-entropy."""
    P = "p"
    """w = p: DFT, arXiv 2508.05629."""
    PHI = "phi"
    """w = p (1 - p): CHORD, arXiv 2508.11408. Small where p is near 0 or 1."""
    SHAPED = "shaped"
    """loss = -A p / (p + c), fully differentiated, with the advantage A: LUFFY, arXiv 2504.14945.
    """
    TRUST = "trust"
    """loss = -p / max(p, c), with a detached denominator: TRAPO, arXiv 2512.17636."""


# Further outputs that the log-probability functions compute on request; the names are TRL's.
MORE_OUTPUTS = ("log_sum_sq_probs", "mean_logits", "is_top1")
REDUCTIONS = ("sequence", "token", "constant", "sum")
# The named options of LossSpec and their values.
CHOICES = {
    "demo_weight": tuple(DemoWeight),
    "rollout_reduction": REDUCTIONS,
    "demo_reduction": REDUCTIONS,
    "kl_estimator": ("k1", "k2", "k3"),
    "policy_loss": ("clip", "cispo", "sapo", "reinforce"),
    "importance_sampling_level": ("token", "sequence"),
    "correction": (
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "probability_mask",
        "probability_mask_away",
    ),
    "teacher_loss": ("k1", "k2", "k3", "forward_kl", "reverse_kl"),
}
# The teacher's losses of K tokens and the rest; the others are of the sampled token.
TOP_K_LOSSES = ("forward_kl", "reverse_kl")
# `correction_max` of a mask by probabilities, if it has the default value of the other corrections
MAX_PROBABILITY_DIFFERENCE = 0.3


class Bound(NamedTuple):
    """The valid values of a numeric option: above `low`, and finite."""

    low: float
    use: str  # what the error message recommends
    closed: bool = False  # `low` itself is valid
    optional: bool = False  # None is valid

    def error(self, name: str, value: object) -> Exception | None:
        """The error of an invalid value."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            if self.optional and value is None:
                return None
            return TypeError(f"{name}={value!r}: use a number{' or None' * self.optional}")
        if self.low < value < math.inf or (self.closed and value == self.low):
            return None
        return ValueError(f"{name}={value!r}: use {self.use}")


_FINITE = Bound(-math.inf, "a finite number")
_POSITIVE = Bound(0, "a finite number > 0")
_CLIP = Bound(0, "a number >= 0, or None for no bound", closed=True, optional=True)
# CISPO's upper bound may be below 1.
_CISPO = Bound(-1, "a number >= -1, or None for no bound", closed=True, optional=True)
# The numeric fields of LossSpec.
NUMBERS = {
    "clip_low": _CLIP,
    "clip_high": _CLIP,
    "dual_clip": Bound(1, "a number > 1, or None", optional=True),
    "kl_coef": _FINITE,
    "entropy_coef": _FINITE,
    "demo_shape": _POSITIVE,
    "max_tokens": _POSITIVE._replace(optional=True),
    "temperature": _POSITIVE,
    "correction_min": _CLIP,
    "correction_max": _CLIP,
    "teacher_coef": _FINITE,
}


@dataclass(frozen=True)
class LossSpec:
    """Options of the loss.

    Raises:
        TypeError: a field that is not a number.
        ValueError: an invalid value; the message names the field and the valid values.
    """

    clip_low: float | None = 0.2
    """The probability ratio to the sampling policy is clipped to at least 1 - clip_low; None: no
    lower clip.
    """
    clip_high: float | None = 0.2
    """The ratio is clipped to at most 1 + clip_high; None: no upper clip. Log-ratios above
    40, which only wrong `old_logps` reach, are clamped with zero gradient.
    """
    dual_clip: float | None = None
    """c > 1: with a negative advantage A the policy term is at most -c A (arXiv 1912.09729)."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy (`ref_logps`) on every rollout token."""
    kl_estimator: str = "k3"
    """Estimator of that KL: "k1", "k2" or "k3" (joschu.net/blog/kl-approx.html). k3 overflows
    float32 if ref - logp exceeds 88: the loss and the gradient are then not finite.
    """
    entropy_coef: float = 0.0
    """Weight of the entropy bonus on every rollout token."""
    demo_weight: DemoWeight = DemoWeight.PHI
    """Weight of the demonstration tokens; a string such as "phi" is converted."""
    demo_shape: float = 0.1
    """The constant c of the weights "shaped" and "trust"."""
    rollout_reduction: str = "sequence"
    """How token losses are reduced to the rollout term: "sequence" (mean per sequence, then over
    sequences), "token" (mean over all tokens), "constant" (sum / (sequences * `max_tokens`)) or
    "sum" (sum / sequences).
    """
    demo_reduction: str = "token"
    """The same for the demonstration term."""
    max_tokens: float | None = None
    """Number of tokens that a "constant" reduction counts for each sequence."""
    temperature: float = 1.0
    """The logits are divided by it before the softmax."""
    policy_loss: str = "clip"
    """The policy term of a rollout token with ratio r and advantage A: "clip" (PPO, GRPO),
    "cispo" (-clip(r) A logp with detached clip(r), arXiv 2506.13585), "sapo" (a soft clip,
    -(4 / tau) sigmoid(tau (r - 1)) A, arXiv 2511.20347) or "reinforce" (-A logp).
    """
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    """tau of "sapo" where A > 0, and elsewhere."""
    importance_sampling_level: str = "token"
    """"token": each token's own ratio. "sequence": exp of the mean log-ratio over the rollout
    tokens of the sequence (GSPO, arXiv 2507.18071).
    """
    correction: str = "none"
    """Importance correction for log-probs from another engine (`rollout_logps`): "none", or a
    detached factor of the policy term, exp(old - rollout) or, without `old_logps`,
    exp(current - rollout). "token_truncate" and "token_mask" use one factor per token;
    "sequence_truncate" and "sequence_mask" use one per sequence, from the sum over its rollout
    tokens. Truncation clamps the factor to [correction_min, correction_max]; masking sets it to 0
    outside. "probability_mask" removes the policy term of the tokens whose current probability
    differs from that of the engine by more than `correction_max` (prime-rl's default), and
    "probability_mask_away" only of those whose update would increase the difference, by the sign
    of the advantage (DPPO-TV, arXiv 2602.04879).
    """
    correction_min: float | None = None
    """Lower bound of that factor, or None."""
    correction_max: float | None = 2.0
    """Upper bound of that factor, or None. For a mask by probabilities, their largest difference,
    at most 1; the default 2.0 means 0.3 there.
    """
    use_bias_correction_kl: bool = False
    """Multiply the KL estimator by the ratio, differentiated: unbiased off-policy (arXiv
    2512.02556).
    """
    teacher_coef: float = 0.0
    """Weight of the teacher's term, a mean over the rollout tokens (`teacher_logps`). It does not
    depend on mu.
    """
    teacher_loss: str = "k2"
    """The teacher's term of a rollout token. Of the sampled token: "k1", "k2" or "k3", as in
    `kl_estimator`, with the teacher as reference. On-policy, the mean gradient of "k2" is that of
    KL(policy, teacher), that of "k3" is that of KL(teacher, policy), and that of "k1" is 0. Of the
    K tokens `teacher_ids`, with the rest of the vocabulary as one more: "forward_kl" is
    KL(teacher, policy), "reverse_kl" is KL(policy, teacher).
    """

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {', '.join(valid)}")
        object.__setattr__(self, "demo_weight", DemoWeight(self.demo_weight))
        if not isinstance(self.use_bias_correction_kl, bool):
            raise TypeError(
                f"use_bias_correction_kl={self.use_bias_correction_kl!r}: use True or False"
            )
        for name, bound in NUMBERS.items():
            is_cispo = (name, self.policy_loss) == ("clip_high", "cispo")
            error = (_CISPO if is_cispo else bound).error(name, getattr(self, name))
            if error is not None:
                raise error
        if self.max_tokens is None and "constant" in (self.rollout_reduction, self.demo_reduction):
            raise ValueError("max_tokens=None: a 'constant' reduction requires a number > 0")
        taus = tuple(self.sapo_tau) if isinstance(self.sapo_tau, (tuple, list)) else ()
        real = all(isinstance(t, (int, float)) and not isinstance(t, bool) for t in taus)
        if len(taus) != 2 or not real or not all(0 < t < math.inf for t in taus):
            raise ValueError(f"sapo_tau={self.sapo_tau!r}: use two finite numbers > 0")
        object.__setattr__(self, "sapo_tau", taus)
        below, above = self.clip_low, self.clip_high
        if below is not None and above is not None and -below > above:
            raise ValueError(
                f"clip_low={below!r}, clip_high={above!r}: use 1 - clip_low <= 1 + clip_high"
            )
        if self.masks_probabilities:
            self._check_probability_mask()
        elif self.correction_max is not None and (self.correction_min or 0) > self.correction_max:
            raise ValueError(
                f"correction_min={self.correction_min!r}: use a number <= "
                f"correction_max={self.correction_max!r}"
            )

    def _check_probability_mask(self) -> None:
        if self.correction_min is not None:
            raise ValueError(
                f"correction_min={self.correction_min!r}: omit it, correction={self.correction!r} "
                "has no lower bound"
            )
        if not self.max_probability_difference <= 1:
            raise ValueError(
                f"correction_max={self.correction_max!r}: use a difference of probabilities in "
                f"[0, 1] with correction={self.correction!r}"
            )

    @property
    def masks_probabilities(self) -> bool:
        """Whether the correction depends on a difference of probabilities."""
        return self.correction.startswith("probability")

    @property
    def max_probability_difference(self) -> float:
        """`correction_max` of a mask by probabilities."""
        is_default = self.correction_max == LossSpec.correction_max
        maximum = MAX_PROBABILITY_DIFFERENCE if is_default else self.correction_max
        return math.nan if maximum is None else maximum

    @functools.cached_property
    def token_options(self) -> dict[str, float]:
        """The options of the per-token formulas as numbers, in the order of `csrc/token_math.h`.

        None becomes a number that has no effect, an enumerated option the index that C++ uses.
        """
        correction_max = math.inf if self.correction_max is None else float(self.correction_max)
        return {
            "ratio_low": -math.inf if self.clip_low is None else 1 - self.clip_low,
            "ratio_high": math.inf if self.clip_high is None else 1 + self.clip_high,
            "dual_clip": math.inf if self.dual_clip is None else float(self.dual_clip),
            "kl_coef": float(self.kl_coef),
            "kl_estimator": CHOICES["kl_estimator"].index(self.kl_estimator),
            "entropy_coef": float(self.entropy_coef),
            "demo_weight": CHOICES["demo_weight"].index(self.demo_weight),
            "demo_shape": float(self.demo_shape),
            "policy": CHOICES["policy_loss"].index(self.policy_loss),
            "sapo_tau_positive": float(self.sapo_tau[0]),
            "sapo_tau_negative": float(self.sapo_tau[1]),
            "kl_ratio": float(self.use_bias_correction_kl),
            "mask_correction": float(self.correction.endswith("mask")),
            "correction_min": float(self.correction_min or 0),
            "correction_max": correction_max,
        }

    @functools.cached_property
    def packed_options(self) -> bytes:
        """`token_options` as consecutive float64 numbers, for C++."""
        return struct.pack(f"{len(self.token_options)}d", *self.token_options.values())

    def encode(self) -> list[float]:
        """All options as numbers, for operators (None becomes nan); `decode` is the inverse."""
        chosen = [valid.index(getattr(self, name)) for name, valid in CHOICES.items()]
        numbers = [getattr(self, name) for name in NUMBERS]
        values = *chosen, *numbers, self.use_bias_correction_kl, *self.sapo_tau
        return [math.nan if x is None else float(x) for x in values]

    @classmethod
    def decode(cls, values: Sequence[float]) -> LossSpec:
        """Decode the result of `encode`."""
        rest: Any = iter([None if math.isnan(x) else x for x in values])
        named: dict[str, Any] = {name: valid[int(next(rest))] for name, valid in CHOICES.items()}
        named |= {name: next(rest) for name in NUMBERS}
        return cls(**named, use_bias_correction_kl=bool(next(rest)), sapo_tau=tuple(rest))


TOKEN_OPTIONS = tuple(LossSpec().token_options)


class Signals(NamedTuple):
    """The controller's three inputs, each nan if the batch cannot provide it."""

    sft_variance: float
    """sigma_s^2: trimmed variance of the demonstrations' mean negative log-likelihood, nats^2."""
    rl_variance: float
    """sigma_r^2: variance of the rollouts' sequence-level advantage."""
    disagreement: float
    """Delta g~^2: mean squared difference of the z-scored phi(p_t) and A_t of rollout tokens."""


@dataclass(frozen=True)
class TokenMoments:
    """Sufficient statistics of a batch; `a + b` combines those of two batches.

    The rollout moments are means and centered sums, so merging loses no precision.
    Each rollout token has w = 1 / (tokens of its sequence), s = phi(p_t) and r = A_t.
    """

    rollouts: torch.Tensor
    """float64 [7]: n non-empty rollouts, mean s, mean r, then the centered sums
    sum w (s - mean s)^2, sum w (r - mean r)^2, sum w (s - mean s)(r - mean r), and
    sum over rollouts of (mean_t A_t - mean r)^2."""
    demo_nll: torch.Tensor
    """float64 [S]: each demonstration's mean negative log-likelihood. -inf, an impossible value,
    marks rollouts and empty demonstrations; nan marks a demonstration with a nan log-probability.
    """
    totals: torch.Tensor
    """float64 [6]: rollout tokens, demonstration tokens, sum of the KL estimator, clipped tokens,
    sum of the entropy over rollout tokens, sum of the entropy over demonstration tokens."""

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> TokenMoments:
        """The identity element of `+`."""
        return cls(*(torch.zeros(n, dtype=torch.float64, device=device) for n in (7, 0, 6)))

    @classmethod
    def merged(cls, parts: Sequence[TokenMoments]) -> TokenMoments:
        """Merge one or more `parts` on the device of the first."""
        device = parts[0].totals.device
        local_parts = [part if part.totals.device == device else part.to(device) for part in parts]
        rollouts = torch.stack([part.rollouts for part in local_parts])
        counts, means = rollouts[:, 0], rollouts[:, 1:3]
        count = counts.sum()
        mean = counts @ means / count.clamp(min=1)
        s, r = (means - mean).T
        # sums of squares around the common mean: within parts plus between parts
        sums = rollouts[:, 3:].sum(0) + torch.stack([s * s, r * r, s * r, r * r]) @ counts
        return cls(
            torch.cat([count[None], mean, sums]),
            torch.cat([part.demo_nll for part in local_parts]),
            torch.stack([part.totals for part in local_parts]).sum(0),
        )

    def __add__(self, other: TokenMoments) -> TokenMoments:
        if not isinstance(other, TokenMoments):
            return NotImplemented
        return TokenMoments.merged([self, other])

    def __radd__(self, other: int) -> TokenMoments:
        return self if other == 0 else NotImplemented  # `sum` starts with 0

    def to(self, device: torch.device | str) -> TokenMoments:
        """Copy the moments to another device."""
        return TokenMoments(*(getattr(self, f.name).to(device) for f in fields(self)))

    def all_reduce(self, group: torch.distributed.ProcessGroup | None = None) -> TokenMoments:
        """Merge the moments of all ranks of `group`; a no-op without a process group.

        The result is the same on each rank, bit for bit.
        """
        if (
            not (torch.distributed.is_available() and torch.distributed.is_initialized())
            or torch.distributed.get_world_size(group) == 1
        ):
            return self
        ranks = torch.distributed.get_world_size(group)
        size = torch.tensor([self.demo_nll.numel()], device=self.demo_nll.device)
        sizes = [torch.zeros_like(size) for _ in range(ranks)]
        torch.distributed.all_gather(sizes, size, group=group)
        longest = max(int(s) for s in sizes)
        local = torch.cat([self.rollouts, self.totals, self.demo_nll])
        local = torch.nn.functional.pad(local, (0, 13 + longest - local.numel()), value=-math.inf)
        gathered = [torch.empty_like(local) for _ in range(ranks)]
        torch.distributed.all_gather(gathered, local, group=group)
        return TokenMoments.merged([TokenMoments(row[:7], row[13:], row[7:13]) for row in gathered])

    def signals(self, trim: float = 0.1) -> Signals:
        """Compute the controller's inputs (the paper's equations 7 to 9); copies to the host once.

        Args:
            trim: fraction of the sorted demonstrations dropped at each end, in [0, 0.5).

        Raises:
            ValueError: `trim` is out of range.
        """
        if not 0 <= trim < 0.5:
            raise ValueError(f"trim={trim!r}: use a fraction in [0, 0.5)")
        n, _, _, ss, rr, sr, aa, *nlls = torch.cat([self.rollouts, self.demo_nll]).tolist()
        sft = _trimmed_variance([x for x in nlls if x != -math.inf], trim)
        if n == 0:
            return Signals(sft, math.nan, math.nan)
        # a constant signal has z = 0; "not <=" propagates nan
        has_s, has_r = not ss / n <= 1e-12, not rr / n <= 1e-12
        rho = sr / math.sqrt(ss) / math.sqrt(rr) if has_s and has_r else 0.0
        rho = min(max(rho, -1.0), 1.0)  # rounding
        return Signals(sft, aa / n, has_s + has_r - 2.0 * rho)

    @property
    def rollout_tokens(self) -> torch.Tensor:
        """0-d: number of rollout tokens that have a loss."""
        return self.totals[0]

    @property
    def demo_tokens(self) -> torch.Tensor:
        """0-d: number of demonstration tokens that have a loss."""
        return self.totals[1]

    @property
    def kl(self) -> torch.Tensor:
        """0-d: mean KL estimator per rollout token, nats; nan without rollouts or reference."""
        return self.totals[2] / self.totals[0]

    @property
    def clip_fraction(self) -> torch.Tensor:
        """0-d: fraction of rollout tokens whose gradient was removed by clipping."""
        return self.totals[3] / self.totals[0].clamp(min=1)

    @property
    def entropy(self) -> torch.Tensor:
        """0-d: mean entropy per rollout token, nats; nan without rollouts."""
        return self.totals[4] / self.totals[0]


def _trimmed_variance(values: list[float], trim: float) -> float:
    """Population variance without the fraction `trim` at each end.

    nan if `values` is empty or contains nan.
    """
    if not values or any(map(math.isnan, values)):
        return math.nan
    dropped = math.floor(trim * len(values))
    kept = sorted(values)[dropped : len(values) - dropped]
    mean = sum(kept) / len(kept)
    return sum((x - mean) * (x - mean) for x in kept) / len(kept)  # x ** 2 would raise on overflow


class LossOutput(NamedTuple):
    """Output of the fused losses. All but `loss` are detached; losses are float32 0-d tensors."""

    # a named tuple, because FSDP's hooks find no tensors inside dataclasses

    loss: torch.Tensor
    """(1 - mu) rollout_loss + mu demo_loss, plus teacher_coef teacher_loss with a teacher;
    differentiable once."""
    rollout_loss: torch.Tensor
    """The reduced rollout term, 0 without rollouts."""
    demo_loss: torch.Tensor
    """The reduced demonstration term, 0 without demonstrations."""
    kl: torch.Tensor
    """Mean KL estimator per rollout token; nan without `ref_logps` or without rollouts."""
    clip_fraction: torch.Tensor
    """Fraction of rollout tokens whose gradient was removed by clipping."""
    logps: torch.Tensor
    """float32, like targets: log-probability of each target, 0 where there is no loss."""
    entropy: torch.Tensor
    """float32, like targets: entropy of each distribution in nats, 0 where there is no loss."""
    moments: TokenMoments | None
    """Sufficient statistics for the controller; None if `moments=False`."""
    teacher_loss: torch.Tensor | None = None
    """The reduced teacher's term, 0 without rollouts; None without `teacher_logps`."""

    def shaped(self, shape: torch.Size, **changes: Any) -> LossOutput:
        """Reshape [N] log-probs and entropies to `shape`, that of the targets."""
        logps, entropy = self.logps.view(shape), self.entropy.view(shape)
        return self._replace(logps=logps, entropy=entropy, **changes)


class TokenLossOutput(NamedTuple):
    """Output of `fused_linear_token_loss`, followed by the requested further outputs by name."""

    loss: torch.Tensor
    """0-d: the sum of the losses; differentiable once."""
    losses: torch.Tensor
    """Like targets, detached: the loss of each token, 0 where there is no loss."""
    logps: torch.Tensor
    """Like targets, detached: log-probability of each target, 0 where there is no loss."""
    entropy: torch.Tensor
    """Like targets, detached: entropy of each distribution in nats, 0 where there is no loss."""

    @classmethod
    def named(cls, values: Sequence[Any], outputs: Sequence[str]) -> TokenLossOutput:
        """Build the output from `values`, with a field for each of `outputs` at the end."""
        kind: Any = _output_type(tuple(outputs)) if outputs else cls
        return kind._make(values)


class DivergenceOutput(NamedTuple):
    """Output of `fused_linear_divergence`."""

    loss: torch.Tensor
    """0-d: the sum of the weighted divergences; differentiable once."""
    losses: torch.Tensor
    """Like targets, detached: the divergence of each token in nats, without its weight; 0 where
    there is no loss."""
    entropy: torch.Tensor
    """Like targets, detached: entropy of the student's distribution in nats, 0 where there is no
    loss."""


@functools.cache
def _output_type(outputs: tuple[str, ...]) -> type:
    """A named tuple, because FSDP's hooks find no tensors inside other classes."""
    return cast("Any", namedtuple("TokenLossOutput", (*TokenLossOutput._fields, *outputs)))
