"""Fuzz tests: the public losses on random inputs, against the float64 reference.

Hypothesis draws shapes, strides, dtypes, layouts, masks, options and extreme values. The suite runs
a small fixed number of inputs; `python -m bench.fuzz` runs 10,000 of each kind and records the
result.
"""

from __future__ import annotations

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
    token_logprobs,
)
from gac_kernels.contract import MAX_LOG_RATIO

from .cases import available, check

CPU = torch.device("cpu")
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
brief = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=QUIET)
long = settings(deadline=None, max_examples=10_000, database=None, suppress_health_check=QUIET)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = [
    name
    for name in ("native", "reference")
    if backends.unavailable(name, CPU, torch.float32) is None
]
OUTPUTS = ("loss", "rollout_loss", "demo_loss", "kl", "logps", "entropy")
MARGIN = (
    0.02  # ratios closer than this to a clip bound may fall on either side of it after rounding
)


class Input(NamedTuple):
    """One call: the logits, the positional arguments after them, and the keywords."""

    logits: Tensor
    batch: tuple[Tensor, Tensor, Tensor]
    keywords: dict[str, Any]

    def double(self) -> Input:
        """The same values in float64."""
        wide = {
            k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for k, x in self.keywords.items()
        }
        targets, advantages, is_demo = self.batch
        return Input(self.logits.double(), (targets, advantages.double(), is_demo), wide)

    @property
    def clear(self) -> bool:
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
        still = 1.0 if 0.0 in (low, high) else None
        edges = (low and 1 - low, high and 1 + high, spec.dual_clip, still)
        return all(not e or bool(((ratio - e).abs() > MARGIN).all()) for e in edges)


@st.composite
def specs(draw: st.DrawFn) -> LossSpec:
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
    """A batch with empty sequences, masked logits, peaked rows and arbitrary row strides."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype, spec = draw(st.sampled_from(DTYPES)), draw(specs())
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    words = draw(st.sampled_from([1, 2, 3, 7, 15, 16, 17, 31, 64, 101, 130, 1027]))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 10.0, 300.0, 2e4]))
    shift = draw(st.sampled_from([0.0, -300.0, 2e4]))
    room = draw(st.sampled_from([0, 1, 5, 16]))
    wide = torch.randn(rows, width, words + room, generator=g)
    logits = (
        (wide * scale + shift).clamp(-6e4, 6e4).to(dtype)[..., :words]
    )  # the row stride may exceed the row length
    dead = draw(st.integers(0, words - 1))
    logits[..., words - dead :] = -torch.inf if draw(st.booleans()) else logits[..., words - dead :]
    targets = torch.randint(0, words - dead, (rows, width), generator=g)
    targets[torch.rand(rows, width, generator=g) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -100
    is_demo = torch.rand(rows, generator=g) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    size = draw(st.sampled_from([0.0, 1.0, 1e4]))
    advantages = torch.randn((rows, width) if draw(st.booleans()) else (rows,), generator=g) * size
    past, _ = token_logprobs(
        logits.double(), targets, temperature=spec.temperature, backend="reference"
    )
    spread = draw(st.sampled_from([0.0, 0.3, 3.0, 100.0]))
    old, ref = ((past + spread * torch.randn(rows, width, generator=g)).float() for _ in "ab")
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
    # the same rows packed and cut at random points, which also gives empty sequences
    total = rows * width
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=rows - 1, max_size=rows - 1)))
    keywords["cu_seqlens"] = torch.tensor([0, *cuts, total], dtype=torch.int32)
    keywords |= {
        k: x.flatten() for k in ("old_logps", "ref_logps") if (x := keywords[k]) is not None
    }
    flat = torch.empty(total, words + room, dtype=dtype)[:, :words]
    flat.copy_(logits.flatten(0, 1))
    if advantages.dim() == 2:
        advantages = advantages.flatten()
    return Input(flat, (targets.flatten(), advantages, is_demo), keywords)


def result(given: Input, backend: str) -> tuple[Any, Tensor]:
    """Return the outputs of a call and the gradient with respect to its logits."""
    logits = given.logits.detach().requires_grad_()
    out = fused_gac_loss(logits, *given.batch, **given.keywords, backend=backend)
    (grad,) = torch.autograd.grad(out.loss, logits)
    return out, grad


def right(given: Input) -> None:
    """Assert that the native kernels are as accurate as the reference in the input's own dtype."""
    assume(given.clear)
    truth, d_truth = result(given.double(), "reference")
    same, d_same = result(given, "reference")
    out, grad = result(given, available("native"))
    size = float(truth.logps.detach().abs().max())
    for name in OUTPUTS:
        agree(name, *(getattr(o, name) for o in (out, same, truth)), size)
    agree("gradient of logits", grad, d_same, d_truth, size, torch.finfo(given.logits.dtype).eps)


def agree(
    name: str, ours: Tensor, same: Tensor, truth: Tensor, size: float, unit: float = 0.0
) -> None:
    """Like `check`, but skipped if the float64 value is not finite or is out of float32's range.

    size: magnitude of the largest log-probability, whose rounding error affects every ratio and KL.
    """
    limit = torch.finfo(ours.dtype).max / 4
    if not bool((truth.abs() < limit).all()):  # nan, or beyond the dtype
        assert name == "kl" or not bool(truth.isnan().any()), f"{name}: nan in float64"
        return
    gain = 1 + float(truth.detach().abs().max()) if truth.numel() else 1.0
    rounding = size * torch.finfo(torch.float32).eps
    check(name, ours, same, truth, unit + 8 * rounding * gain / (gain - 1 + 1e-3))


@brief
@given(inputs())
def test_random_inputs_of_the_loss(given: Input) -> None:
    right(given)


@brief
@given(inputs(), st.sampled_from([torch.nan, torch.inf]), st.integers(0, 10**6))
def test_a_broken_row_is_never_a_finite_number(given: Input, value: float, where: int) -> None:
    broken(given, value, where)


def broken(given: Input, value: float, where: int) -> None:
    """A nan or +inf logit in a row with a loss gives a nan loss; masked rows are not read."""
    rows = given.logits.reshape(-1, given.logits.shape[-1]).clone()
    live = given.batch[0].flatten() >= 0
    row = where % len(rows)
    rows[row, where % rows.shape[1]] = value
    poisoned = given._replace(logits=rows.view((*given.batch[0].shape, -1)))
    for backend in BACKENDS:
        out, grad = result(poisoned, backend)
        if live[row]:
            assert out.loss.isnan() and out.logps.flatten()[row].isnan(), backend
            continue
        plain, d_plain = result(given, backend)
        assert torch.equal(out.loss, plain.loss) or plain.loss.isnan(), backend
        assert torch.equal(grad.nan_to_num(), d_plain.view_as(grad).nan_to_num()), backend


@brief
@given(inputs(), st.integers(1, 40), st.booleans())
def test_random_inputs_of_the_head(given: Input, width: int, biased: bool) -> None:
    head(given, width, biased)


def head(given: Input, width: int, biased: bool) -> None:
    """Check `fused_linear_gac_loss` against the float64 reference."""
    g = torch.Generator().manual_seed(width)
    words, dtype = given.logits.shape[-1], given.logits.dtype
    leaves = [
        torch.randn(*given.batch[0].shape, width, generator=g),
        torch.randn(words, width, generator=g),
    ]
    leaves += [torch.randn(words, generator=g)] if biased else []
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]

    def loss(leaves: list[Tensor], case: Input, backend: str) -> tuple[Any, tuple[Tensor, ...]]:
        bias = leaves[2] if biased else None
        out = fused_linear_gac_loss(
            *leaves[:2], *case.batch, bias=bias, **case.keywords, backend=backend
        )
        return out, torch.autograd.grad(out.loss, leaves)

    logits = exact[0].detach() @ exact[1].detach().T
    assume(given._replace(logits=logits + (exact[2].detach() if biased else 0)).clear)
    truth, d_truth = loss(exact, given.double(), "reference")
    same, d_same = loss(leaves, given, "reference")
    size = float(truth.logps.detach().abs().max())
    ours, d_ours = loss(leaves, given, available("native"))
    for name in OUTPUTS:
        agree(name, *(getattr(o, name) for o in (ours, same, truth)), size)
    for name, *grads in zip(("hidden", "weight", "bias"), d_ours, d_same, d_truth, strict=False):
        agree(f"gradient of {name}", *grads, size, unit=4 * torch.finfo(dtype).eps)


@pytest.mark.full
@long
@given(inputs(), st.sampled_from([torch.nan, torch.inf]), st.integers(1, 10**6), st.booleans())
def test_ten_thousand_inputs(given: Input, value: float, where: int, biased: bool) -> None:
    broken(given, value, where)
    right(given)
    head(given, 1 + where % 40, biased)
