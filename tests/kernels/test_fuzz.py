"""Fuzz tests: the public losses on random inputs, against the float64 reference.

Hypothesis draws shapes, strides, dtypes, layouts, masks, options and extreme values. `make test`
runs a small fixed number of inputs, `make test-full` 10,000 of each kind, at random unless
`--hypothesis-seed` is given. The last recorded run (seed 1, torch 2.13, CPU) found no failure.
"""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gac_kernels import (
    DemoWeight,
    LossSpec,
    backends,
    fused_gac_loss,
    fused_linear_gac_loss,
    reference,
    token_logprobs,
)
from gac_kernels.contract import MAX_LOG_RATIO
from tests.kernels.cases import CPU, check, require_backend

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
quick = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=QUIET)
exhaustive = settings(
    deadline=None, max_examples=10_000, database=None, suppress_health_check=QUIET
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = [
    name
    for name in ("native", "reference")
    if backends.unavailable(name, CPU, torch.float32) is None
]
OUTPUTS = ("loss", "rollout_loss", "demo_loss", "kl", "logps", "entropy")
MARGIN = 0.02  # a ratio closer than this to a clip bound may be rounded to the other side of it


class Input(NamedTuple):
    """One call of the loss: the logits, the other positional arguments, and the keywords."""

    logits: Tensor
    batch: tuple[Tensor, Tensor, Tensor]
    keywords: dict[str, Any]

    def double(self) -> "Input":
        """The same values in float64."""
        keywords = {
            k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for k, x in self.keywords.items()
        }
        targets, advantages, is_demo = self.batch
        return Input(self.logits.double(), (targets, advantages.double(), is_demo), keywords)

    @property
    def well_conditioned(self) -> bool:
        """Whether every ratio is in float32's range and no clip decision depends on rounding."""
        spec, live = self.keywords["spec"], self.batch[0] >= 0
        logps, _ = token_logprobs(
            self.logits.double(), self.batch[0], backend="reference", temperature=spec.temperature
        )
        old, ref = (self.keywords[name] for name in ("old_logps", "ref_logps"))
        if ref is not None and bool(((ref - logps)[live] > 80).any()):
            return False  # k3 grows as exp(ref - logp)
        if old is None:
            return True
        gap = (logps - old)[live]
        if bool(((gap - MAX_LOG_RATIO).abs() < 0.5).any()):
            return False
        ratio = gap.clamp(max=MAX_LOG_RATIO).exp()
        low, high = spec.clip_low, spec.clip_high
        zero_clip_edge = 1.0 if 0.0 in (low, high) else None
        edges = (low and 1 - low, high and 1 + high, spec.dual_clip, zero_clip_edge)
        return all(not e or bool(((ratio - e).abs() > MARGIN).all()) for e in edges)


@st.composite
def specs(draw: st.DrawFn) -> LossSpec:
    """A random LossSpec."""
    reductions = st.sampled_from(["sequence", "token", "constant"])
    clips = st.sampled_from([None, 0.0, 0.2, 0.9])
    return LossSpec(
        clip_low=draw(clips),
        clip_high=draw(clips),
        dual_clip=draw(st.sampled_from([None, 3.0])),
        kl_coef=draw(st.sampled_from([0.0, 0.1])),
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])),
        entropy_coef=draw(st.sampled_from([0.0, 0.05, -0.01])),
        demo_weight=draw(st.sampled_from(list(DemoWeight))),
        demo_shape=draw(st.sampled_from([1e-3, 0.1, 1.0])),
        rollout_reduction=draw(reductions),
        demo_reduction=draw(reductions),
        max_tokens=draw(st.sampled_from([1, 40])),
        temperature=draw(st.sampled_from([0.05, 0.7, 1.0, 3.0])),
    )


@st.composite
def inputs(draw: st.DrawFn) -> Input:
    """A random batch: empty sequences, masked logits, peaked rows, any row strides."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype, spec = draw(st.sampled_from(DTYPES)), draw(specs())
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    vocab = draw(st.sampled_from([1, 2, 3, 7, 15, 16, 17, 31, 64, 101, 130, 1027]))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 10.0, 300.0, 2e4]))
    shift = draw(st.sampled_from([0.0, -300.0, 2e4]))
    padding = draw(st.sampled_from([0, 1, 5, 16]))  # the row stride may exceed the row length
    padded = torch.randn(rows, width, vocab + padding, generator=g) * scale + shift
    logits = padded.clamp(-6e4, 6e4).to(dtype)[..., :vocab]
    unmasked = vocab - draw(st.integers(0, vocab - 1))
    if draw(st.booleans()):
        logits[..., unmasked:] = -torch.inf
    targets = torch.randint(0, unmasked, (rows, width), generator=g)
    targets[torch.rand(rows, width, generator=g) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -100
    is_demo = torch.rand(rows, generator=g) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    size = draw(st.sampled_from([0.0, 1.0, 1e4]))
    advantages = torch.randn((rows, width) if draw(st.booleans()) else (rows,), generator=g) * size
    logps, _ = token_logprobs(
        logits.double(), targets, temperature=spec.temperature, backend="reference"
    )
    spread = draw(st.sampled_from([0.0, 0.3, 3.0, 100.0]))
    old, ref = (logps + spread * torch.randn(2, rows, width, generator=g)).float()
    keywords: dict[str, Any] = {
        "mu": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "spec": spec,
        "old_logps": old if draw(st.booleans()) else None,
        "ref_logps": ref if spec.kl_coef or draw(st.booleans()) else None,
    }
    if draw(st.booleans()):
        keywords |= {"rollout_norm": 7.0, "demo_norm": 3.0}
    if not draw(st.booleans()):
        return Input(logits, (targets, advantages, is_demo), keywords)
    # the same rows packed and split at random points, which also gives empty sequences
    total = rows * width
    ends = sorted(draw(st.lists(st.integers(0, total), min_size=rows - 1, max_size=rows - 1)))
    keywords["cu_seqlens"] = torch.tensor([0, *ends, total], dtype=torch.int32)
    keywords |= {
        k: x.flatten() for k in ("old_logps", "ref_logps") if (x := keywords[k]) is not None
    }
    flat = torch.empty(total, vocab + padding, dtype=dtype)[:, :vocab]
    flat.copy_(logits.flatten(0, 1))
    if advantages.dim() == 2:
        advantages = advantages.flatten()
    return Input(flat, (targets.flatten(), advantages, is_demo), keywords)


def result(call: Input, backend: str) -> tuple[Any, Tensor]:
    """Return the outputs of a call and the gradient of its logits."""
    logits = call.logits.detach().requires_grad_()
    out = fused_gac_loss(logits, *call.batch, **call.keywords, backend=backend)
    (grad,) = torch.autograd.grad(out.loss, logits)
    return out, grad


def check_accuracy(call: Input) -> None:
    """Assert that the native kernels are as accurate as the reference in the input's own dtype."""
    assume(call.well_conditioned)
    truth, d_truth = result(call.double(), "reference")
    same_dtype, d_same_dtype = result(call, "reference")
    out, grad = result(call, require_backend("native"))
    size = float(truth.logps.detach().abs().max())
    for name in OUTPUTS:
        check_in_range(name, *(getattr(o, name) for o in (out, same_dtype, truth)), size)
    check_in_range(
        "gradient of logits", grad, d_same_dtype, d_truth, size, torch.finfo(call.logits.dtype).eps
    )


def check_in_range(
    name: str,
    ours: Tensor,
    same_dtype: Tensor,
    truth: Tensor,
    size: float,
    extra_rtol: float = 0.0,
) -> None:
    """Check a result unless its float64 value is infinite or out of float32's range.

    size: magnitude of the largest log-probability, whose rounding error affects every ratio and KL.
    """
    limit = torch.finfo(ours.dtype).max / 4
    if not bool((truth.abs() < limit).all()):  # nan, or beyond the dtype
        assert name == "kl" or not bool(truth.isnan().any()), f"{name}: nan in float64"
        return
    gain = 1 + float(truth.detach().abs().max()) if truth.numel() else 1.0
    rounding = size * torch.finfo(torch.float32).eps
    check(name, ours, same_dtype, truth, extra_rtol + 8 * rounding * gain / (gain - 1 + 1e-3))


@quick
@given(inputs())
def test_random_inputs_of_the_loss(call: Input) -> None:
    check_accuracy(call)


@quick
@given(inputs(), st.sampled_from([torch.nan, torch.inf]), st.integers(0, 10**6))
def test_non_finite_logits_never_give_a_finite_loss(call: Input, value: float, where: int) -> None:
    check_non_finite_row(call, value, where)


def check_non_finite_row(call: Input, value: float, where: int) -> None:
    """A nan or +inf logit in a row with a loss gives a nan loss; masked rows are not read."""
    rows = call.logits.reshape(-1, call.logits.shape[-1]).clone()
    live = call.batch[0].flatten() >= 0
    row = where % len(rows)
    rows[row, where % rows.shape[1]] = value
    poisoned = call._replace(logits=rows.view((*call.batch[0].shape, -1)))
    for backend in BACKENDS:
        out, grad = result(poisoned, backend)
        if live[row]:
            assert out.loss.isnan(), backend
            assert out.logps.flatten()[row].isnan(), backend
            continue
        clean, d_clean = result(call, backend)
        assert torch.equal(out.loss, clean.loss) or clean.loss.isnan(), backend
        assert torch.equal(grad.nan_to_num(), d_clean.view_as(grad).nan_to_num()), backend


@quick
@given(inputs(), st.integers(1, 40), st.booleans())
def test_random_inputs_of_the_head(call: Input, width: int, biased: bool) -> None:
    check_linear(call, width, biased)


def check_linear(call: Input, width: int, biased: bool) -> None:
    """Check `fused_linear_gac_loss` against the float64 reference."""
    g = torch.Generator().manual_seed(width)
    vocab, dtype = call.logits.shape[-1], call.logits.dtype
    leaves = [
        torch.randn(*call.batch[0].shape, width, generator=g),
        torch.randn(vocab, width, generator=g),
    ]
    leaves += [torch.randn(vocab, generator=g)] if biased else []
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    doubles = [x.detach().double().requires_grad_() for x in leaves]

    def loss(leaves: list[Tensor], call: Input, backend: str) -> tuple[Any, tuple[Tensor, ...]]:
        bias = leaves[2] if biased else None
        out = fused_linear_gac_loss(
            *leaves[:2], *call.batch, bias=bias, **call.keywords, backend=backend
        )
        return out, torch.autograd.grad(out.loss, leaves)

    logits = reference.linear_logits(*(x.detach() for x in doubles))
    assume(call._replace(logits=logits).well_conditioned)
    truth, d_truth = loss(doubles, call.double(), "reference")
    same_dtype, d_same_dtype = loss(leaves, call, "reference")
    size = float(truth.logps.detach().abs().max())
    ours, d_ours = loss(leaves, call, require_backend("native"))
    for name in OUTPUTS:
        check_in_range(name, *(getattr(o, name) for o in (ours, same_dtype, truth)), size)
    for name, *grads in zip(
        ("hidden", "weight", "bias")[: len(leaves)], d_ours, d_same_dtype, d_truth, strict=True
    ):
        check_in_range(f"gradient of {name}", *grads, size, 4 * torch.finfo(dtype).eps)


@pytest.mark.full(reason="10,000 inputs")
@exhaustive
@given(inputs(), st.sampled_from([torch.nan, torch.inf]), st.integers(1, 10**6), st.booleans())
def test_ten_thousand_inputs(call: Input, value: float, where: int, biased: bool) -> None:
    check_non_finite_row(call, value, where)
    check_accuracy(call)
    check_linear(call, 1 + where % 40, biased)
