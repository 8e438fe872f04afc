"""Shared inputs for the loss tests: named cases, each with the reason it exists.

Notation: B padded rows, T row length, N tokens, V vocabulary, H hidden size, S sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gac_kernels import DemoWeight, LossSpec, backends, fused_linear_gac_loss, reference
from gac_kernels.backends import cuda
from gac_kernels.tokens import Tokens

CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)
H = 24  # hidden size; the logits are hidden @ weight.T + bias
LEAVES = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Case:
    """One batch and one specification."""

    name: str
    reason: str
    spec: LossSpec = field(default_factory=LossSpec)
    vocabulary: int = 101  # prime: no multiple of any vector or tile
    lengths: tuple[int, ...] = (4, 3, 0, 2, 4, 1)  # number of loss tokens; 0 = an empty sequence
    demos: tuple[int, ...] = (0, 1, 0, 0, 1, 1)
    packed: bool = False
    per_token: bool = False  # advantages per token
    peak: float = 1.0  # scale of the logits; a trained model's distributions are peaked
    unmasked: tuple[slice, ...] = (slice(None),)  # the other entries' logits are -inf
    softcap: float | None = None
    logit_scale: float = 1.0
    mu: float = 0.4
    old: float | None = None  # standard deviation of logp - old_logps; None = on-policy
    ref: float | None = None  # standard deviation of logp - ref_logps; None = no reference
    rollout: float | None = None  # of logp - rollout_logps, with weights; None = no correction


@dataclass
class Batch:
    """The inputs of one case; hidden, weight and bias are leaf tensors."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    advantages: Tensor
    is_demo: Tensor
    keywords: dict[str, Any]  # that every entry point accepts

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The positional arguments of every entry point, after the operands."""
        return self.targets, self.advantages, self.is_demo

    def logits(self) -> Tensor:
        """The case's logits as a leaf tensor in hidden's dtype."""
        logits = reference.linear_logits(self.hidden, self.weight, self.bias).detach()
        return logits.to(self.hidden.dtype).requires_grad_()

    def linear(self, call: Any = fused_linear_gac_loss, **keywords: Any) -> Any:
        """The outputs of a linear form of the loss."""
        options = self.keywords | keywords
        return call(self.hidden, self.weight, *self.inputs, bias=self.bias, **options)

    def to(self, dtype: torch.dtype) -> "Batch":
        """A copy of the batch whose leaf tensors have another dtype."""
        leaves = [
            x.detach().to(dtype).requires_grad_() for x in (self.hidden, self.weight, self.bias)
        ]
        return Batch(*leaves, *self.inputs, self.keywords)


def build(case: Case, dtype: torch.dtype = torch.float32) -> "Batch":
    """Build the case's batch; values are equal across dtypes up to rounding."""
    g = torch.Generator().manual_seed(len(case.name))
    sequences, width = len(case.lengths), max(case.lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden, weight = normal(sequences, width, H), normal(case.vocabulary, H) * case.peak / H**0.5
    bias = normal(case.vocabulary) / 2
    entries = torch.cat([torch.arange(case.vocabulary)[part] for part in case.unmasked])
    bias = torch.full_like(bias, -torch.inf).index_copy(0, entries, bias[entries])
    targets = entries[torch.randint(0, len(entries), (sequences, width), generator=g)]
    # the first target is the most likely token, so that its p is high
    targets[:, 0] = reference.linear_logits(hidden, weight, bias)[:, 0].argmax(-1)
    live = torch.arange(width) < torch.tensor(case.lengths)[:, None]
    targets[~live] = -100
    is_demo = torch.tensor(case.demos, dtype=torch.bool)
    advantages = normal(*((sequences, width) if case.per_token else (sequences,))).float()
    scaling = {"softcap": case.softcap, "logit_scale": case.logit_scale}
    logps, _ = reference.linear_token_logprobs(
        hidden, weight, targets, bias=bias, temperature=case.spec.temperature, **scaling
    )
    columns = {
        f"{name}_logps": (logps + spread * normal(sequences, width)).float()
        for name in ("old", "ref", "rollout")
        if (spread := getattr(case, name)) is not None
    }
    if case.rollout is not None:
        columns["weights"] = torch.rand(sequences, width, generator=g)
    keywords: dict[str, Any] = {"mu": case.mu, "spec": case.spec}
    if case.softcap is not None:
        keywords |= scaling
    if case.packed:  # drop only half of the padding, so that some masked tokens remain
        kept = live | (torch.rand(live.shape, generator=g) < 0.5)
        hidden, targets = hidden[kept], targets[kept]
        columns = {name: x[kept] for name, x in columns.items()}
        advantages = advantages[kept] if case.per_token else advantages
        keywords["cu_seqlens"] = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).to(
            torch.int32
        )
    keywords |= {"old_logps": None, "ref_logps": None, **columns}
    return Batch(hidden, weight, bias, targets, advantages, is_demo, keywords).to(dtype)


CASES = [
    Case("defaults", "the settings most callers use"),
    Case("packed", "the packed layout, with masked tokens", packed=True),
    Case("clip", "both clip bounds are hit for both signs of A", old=0.4),
    Case(
        "no-clip",
        "None disables both clip bounds",
        LossSpec(clip_low=None, clip_high=None),
        old=0.4,
    ),
    Case(
        "one-sided", "only the upper bound clips", LossSpec(clip_low=None, clip_high=0.28), old=0.4
    ),
    Case("dual-clip", "large ratios with A < 0", LossSpec(dual_clip=1.5), old=1.0),
    Case("k1", "the linear estimator", LossSpec(kl_coef=0.1, kl_estimator="k1"), ref=0.3),
    Case(
        "k2", "the quadratic estimator", LossSpec(kl_coef=0.1, kl_estimator="k2"), ref=0.3, old=0.2
    ),
    Case("k3", "the exponential estimator", LossSpec(kl_coef=0.1), ref=0.3, old=0.2, packed=True),
    Case(
        "kl-only-reported", "reference log-probs with kl_coef 0: the KL is reported only", ref=0.3
    ),
    Case("entropy", "entropy has a gradient", LossSpec(entropy_coef=0.05, temperature=0.7)),
    Case("one", "cross-entropy", LossSpec(demo_weight=DemoWeight.ONE)),
    Case("p", "DFT", LossSpec(demo_weight=DemoWeight.P), peak=3.0),
    Case("shaped", "uses A on demonstrations", LossSpec(demo_weight=DemoWeight.SHAPED)),
    Case("trust", "both sides of max(p, c)", LossSpec(demo_weight=DemoWeight.TRUST), peak=3.0),
    Case(
        "constant",
        "norm from max_tokens",
        LossSpec(rollout_reduction="constant", demo_reduction="constant", max_tokens=9),
    ),
    Case(
        "swapped-reductions",
        "the default reductions, swapped",
        LossSpec(rollout_reduction="token", demo_reduction="sequence"),
    ),
    Case("per-token", "advantages per token", per_token=True, packed=True, old=0.3),
    Case(
        "masked-vocab",
        "-inf logits mask part of the vocabulary",
        LossSpec(entropy_coef=0.05),
        unmasked=(slice(71),),
    ),
    Case(
        "masked-tiles",
        "whole tiles are masked: before, between and after the others",
        LossSpec(entropy_coef=0.1),
        vocabulary=9001,
        lengths=(2, 1),
        demos=(0, 1),
        unmasked=(slice(4200, 4300), slice(6500, 6501)),
    ),
    Case("peaked logits", "a trained model's logits: p near 1, entropy near 0", peak=12.0),
    Case(
        "wide",
        "a vocabulary wider than one tile of any backend",
        vocabulary=9001,
        lengths=(2, 1, 2),
        demos=(0, 1, 0),
    ),
    Case("a block and one", "one entry more", vocabulary=2049, lengths=(2, 1), demos=(0, 1)),
    Case("tiny", "a vocabulary smaller than one SIMD vector", vocabulary=3),
    Case("one entry", "a vocabulary of one entry", vocabulary=1),
    Case("a whole tile", "exactly one of Triton's tiles in these tests", vocabulary=64),
    Case("a tile and one", "one entry more", LossSpec(entropy_coef=0.1), vocabulary=65),
    Case("cispo", "CISPO", LossSpec(policy_loss="cispo", clip_high=0.05), old=0.3),
    Case("sapo", "both temperatures", LossSpec(policy_loss="sapo", sapo_tau=(1.0, 1.3)), old=0.3),
    Case("reinforce", "REINFORCE", LossSpec(policy_loss="reinforce"), old=0.3),
    Case(
        "kl-ratio",
        "the KL times the ratio",
        LossSpec(kl_coef=0.2, use_bias_correction_kl=True),
        old=0.3,
        ref=0.3,
    ),
    Case(
        "all options",
        "every term at once, with another temperature and bounds of different size",
        LossSpec(kl_coef=0.1, entropy_coef=0.02, dual_clip=1.2, temperature=0.7, clip_high=0.28),
        old=0.3,
        ref=0.3,
    ),
    Case("hot", "a temperature above 1", LossSpec(demo_weight=DemoWeight.P, temperature=2.5)),
    Case(
        "softcap",
        "logits near the cap, scaled first",
        LossSpec(entropy_coef=0.1, temperature=0.8),
        peak=3.0,
        unmasked=(slice(20, 90),),
        softcap=3.0,
        logit_scale=2.0,
    ),
    Case(
        "corrected",
        "weights, and factors against the log-probs of another engine",
        LossSpec(correction="token_truncate", correction_min=0.8, correction_max=1.2, kl_coef=0.1),
        old=0.2,
        ref=0.3,
        rollout=0.4,
    ),
    Case(
        "corrected on-policy",
        "the factor is that of the current log-probs",
        LossSpec(correction="token_truncate", correction_min=0.8, correction_max=1.2, kl_coef=0.1),
        ref=0.3,
        rollout=0.4,
    ),
]
BY_NAME = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
BACKENDS = ["reference", "native", "triton", "cuda"]
each_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)


def on_cuda(backend: str) -> bool:
    """Whether the backend is CUDA's, on emulated threads."""
    return backends.load(backend, CPU) is cuda


def require_backend(name: str, dtype: torch.dtype = torch.float32) -> str:
    """Return the backend's name, or skip the test or file with the reason if it cannot run here."""
    if reason := backends.unavailable(name, CPU, dtype):
        pytest.skip(f"{name}: {reason}", allow_module_level=True)
    return name


def loss_and_grad(call: Any, logits: Tensor, batch: Batch, **keywords: Any) -> Any:
    """Return the outputs, and four times the gradient of the logits."""
    out = call(logits, *batch.inputs, **batch.keywords, **keywords)
    # half-precision gradients are rounded before the factor 4, which adds no rounding error
    return out, torch.autograd.grad(out.loss * 4, logits)


def run_linear(call: Any, batch: Batch, **keywords: Any) -> Any:
    """Return the outputs, and four times the gradients of `LEAVES`."""
    out = batch.linear(call, **keywords)
    return out, torch.autograd.grad(out.loss * 4, [getattr(batch, name) for name in LEAVES])


def in_float64(tokens: Tokens) -> Tokens:
    """The same values, with wide floats."""
    wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in tokens]
    return Tokens(*wide)


def error(value: Tensor, truth: Tensor) -> float:
    """Largest absolute error."""
    return (value.double() - truth.double()).abs().max().item()


def hidden_grad_by_rows(batch: Batch, rows: int) -> Tensor:
    """Gradient of hidden from the reference, with the last GEMM split into chunks of `rows` rows.

    For few rows, BLAS may use a different, less accurate summation order.
    """
    _, (grad,) = loss_and_grad(reference.fused_gac_loss, batch.logits(), batch)
    parts = [part @ batch.weight.detach() for part in grad.flatten(0, -2).split(rows)]
    return torch.cat(parts).view_as(batch.hidden)


def less_accurate(a: Tensor, b: Tensor, truth: Tensor) -> Tensor:
    """Return the less accurate of two results, by maximum error."""
    return max(a, b, key=lambda x: (x.double() - truth).abs().max().item())


def check(
    name: str,
    ours: Tensor,
    same_dtype: Tensor,
    truth: Tensor,
    extra_rtol: float = 0.0,
    floor: float = 1e-3,
) -> None:
    """Assert |ours - truth| <= 2 |same_dtype - truth| + 8 float32 ulp of the largest truth.

    `same_dtype` is the reference's result in our dtype. Errors are maxima over elements.
    `extra_rtol` adds this fraction of the largest truth, for results that are rounded once more.
    `floor` is the least magnitude of the largest truth. The message shows our worst element.
    """
    ours, same_dtype, truth = (x.detach().double() for x in (ours, same_dtype, truth))
    assert ours.shape == truth.shape, f"{name}: shape {ours.shape} instead of {truth.shape}"
    if truth.numel() == 0:
        return
    assert truth.isfinite().all() or name == "kl", f"{name}: the expected value is not finite"
    if truth.isnan().any():
        assert torch.equal(ours.isnan(), truth.isnan()), f"{name}: NaNs at different positions"
        return
    error = (ours - truth).abs().reshape(-1)
    scale = max(truth.abs().max().item(), floor)
    allowed = 2 * (same_dtype - truth).abs().max().item()
    allowed += (extra_rtol + 8 * torch.finfo(torch.float32).eps) * scale
    worst = error.nan_to_num(nan=torch.inf).argmax()
    assert error[worst] <= allowed, (
        f"{name}: element {worst.item()} of {list(truth.shape)} is {ours.reshape(-1)[worst]:.9g}, "
        f"truth {truth.reshape(-1)[worst]:.9g}, error {error[worst]:.3g} > {allowed:.3g}"
    )


def check_outputs(ours: Any, same_dtype: Any, truth: Any, floor: float = 1e-3) -> None:
    """Check every field of a LossOutput; moments are compared through their sums."""
    outputs = ours, same_dtype, truth
    for name in ("loss", "rollout_loss", "demo_loss", "kl", "clip_fraction", "logps", "entropy"):
        check(name, *(getattr(out, name) for out in outputs), floor=floor)
    check("rollouts", *(out.moments.rollouts for out in outputs))
    check("demo_nll", *(torch.nan_to_num(out.moments.demo_nll, neginf=-1.0) for out in outputs))
    totals = (torch.nan_to_num(out.moments.totals, nan=-1.0) for out in outputs)
    check("totals", *totals, floor=floor)


def check_grads(
    names: Iterable[str],
    ours: Iterable[Tensor],
    same_dtype: Iterable[Tensor],
    truth: Iterable[Tensor],
    extra_rtol: float = 0.0,
    floor: float = 1e-3,
) -> None:
    """Check each gradient as `check` does."""
    for name, *grads in zip(names, ours, same_dtype, truth, strict=True):
        check(f"gradient of {name}", *grads, extra_rtol=extra_rtol, floor=floor)
