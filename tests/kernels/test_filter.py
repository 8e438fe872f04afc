"""The gradient filter against exact gradients: bounds, the bias of a sum, exact chunks, reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gac_kernels import (
    FilterReport,
    GradientFilter,
    LossSpec,
    fused_linear_gac_loss,
    fused_linear_token_loss,
    linear_token_logprobs,
)
from gac_kernels.backends import cpu

from tests.kernels.cases import require_backend

N, H, V = 192, 32, 3001
LOSE = GradientFilter(eps=2**-9, max_dropped=0.5)  # drops much, so that errors are visible
BACKENDS = pytest.mark.parametrize("backend", ["reference", "native"])


def peaked(scale: float = 6.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose mass is on few columns, with a long tail; targets drawn from them."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=g, dtype=torch.float64)
    weight[:, -1] = -0.5 * torch.log(torch.arange(V) + 1.0)
    topics = torch.randint(40, (N,), generator=g)
    hidden = scale * weight[topics] / H**0.5 + 0.3 * torch.randn(N, H, generator=g)
    hidden[:, -1] = 4
    targets = (hidden @ weight.T).softmax(-1).multinomial(1, generator=g)[:, 0]
    return hidden.to(dtype), weight.to(dtype), targets


def gradients(
    operands: tuple[Tensor, Tensor, Tensor],
    settings: GradientFilter | None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    lowest: float = -1.0,  # advantage
    **keywords: Any,
) -> tuple[Any, Tensor, Tensor]:
    """The output of a batch of 12 rollouts with mixed advantages, and both gradients."""
    hidden, weight, targets = operands
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    advantages = torch.linspace(lowest, 2, 12)
    advantages[3] = 0  # rows without a gradient
    out = fused_linear_gac_loss(
        leaves[0].view(12, -1, H),
        leaves[1],
        targets.view(12, -1),
        advantages,
        spec=spec,
        gradient_filter=settings,
        **keywords,
    )
    out.loss.backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return out, leaves[0].grad, leaves[1].grad


def distance(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


@BACKENDS
@pytest.mark.parametrize(
    "keywords",
    [{}, {"softcap": 15.0}, {"spec": LossSpec(entropy_coef=0.05)}, {"bias": torch.zeros(V)}],
    ids=["plain", "softcap", "entropy", "bias"],
)
def test_only_the_gradient_of_hidden_changes_and_its_errors_do_not_add_up(
    backend, keywords
) -> None:
    require_backend(backend)
    operands = peaked()
    exact, d_hidden, d_weight = gradients(operands, None, backend=backend, **keywords)
    out, filtered, same = gradients(operands, LOSE, backend=backend, **keywords)
    assert isinstance(out.filter, FilterReport) and exact.filter is None
    assert 0 < out.filter.kept_columns < 0.5 and 0 < out.filter.dropped_mass <= 1
    assert torch.equal(same, d_weight) and torch.equal(out.loss, exact.loss)
    assert torch.equal(out.logps, exact.logps)
    assert torch.equal(out.moments.rollouts, exact.moments.rollouts)
    error = filtered - d_hidden
    assert 1e-5 < distance(filtered, d_hidden) < 0.1
    assert error.sum(0).norm() < 3 * error.norm()  # at random signs 1 times, coherent 14 times
    if "spec" not in keywords:  # without a gradient
        assert filtered.view(12, -1, H)[3].abs().max() == 0


def test_the_error_is_bounded_by_the_dropped_gradient() -> None:
    """||error of dH|| <= ||D - d q^T||_F ||W||_2, with D the dropped entries, in float64."""
    hidden, weight, targets = peaked(dtype=torch.float64)
    operands = hidden, weight, targets
    _, d_hidden, _ = gradients(operands, None, lowest=0.5)
    _, filtered, _ = gradients(operands, LOSE, lowest=0.5, chunk_bytes=1 << 30)
    p = (hidden @ weight.T).softmax(-1)
    advantages = torch.linspace(0.5, 2, 12).double()
    advantages[3] = 0
    scale = advantages.repeat_interleave(N // 12) / N
    grad = (p - torch.nn.functional.one_hot(targets, V)) * scale[:, None]
    at_target = grad.gather(1, targets[:, None])[scale != 0]
    columns = (grad.abs() > LOSE.eps * at_target.square().mean().sqrt()).any(0)
    columns[targets[scale != 0]] = True
    dropped = grad.masked_fill(columns, 0)
    bound = 2 * dropped.norm() * torch.linalg.matrix_norm(weight, 2)
    assert 0 < (filtered - d_hidden).norm() < bound
    plain = d_hidden - dropped @ weight  # without the tail, the errors add up over the rows
    assert distance(filtered.sum(0), d_hidden.sum(0)) < distance(plain.sum(0), d_hidden.sum(0)) / 3


@BACKENDS
def test_eps_0_flat_rows_and_many_columns_are_exact(backend) -> None:
    require_backend(backend)
    operands, flat = peaked(), peaked(0.0)
    for settings, inputs in (
        (GradientFilter(eps=0, weight=True), operands),
        (GradientFilter(eps=2**-30), operands),  # every column is kept
        (GradientFilter(max_columns=1e-4), operands),
        (GradientFilter(eps=2**-9, max_dropped=0), operands),
        (GradientFilter(), (flat[0] * 0, *flat[1:])),
    ):
        _, d_hidden, d_weight = gradients(inputs, None, backend=backend)
        out, same, also = gradients(inputs, settings, backend=backend)
        assert out.filter == FilterReport(torch.tensor(1.0), torch.tensor(0.0)), settings
        assert torch.equal(same, d_hidden) and torch.equal(also, d_weight)


@BACKENDS
@pytest.mark.parametrize("rows", [None, 64])  # of a chunk: all, or a third
def test_the_error_of_the_weight_averages_out(backend, rows) -> None:
    require_backend(backend)
    operands, chunk_bytes = peaked(), rows and rows * V * 4
    keywords = {"backend": backend, "chunk_bytes": chunk_bytes}
    _, _, d_weight = gradients(operands, None, **keywords)
    settings = replace(LOSE, weight=True)
    draws = []
    for seed in (0, 0, *range(1, 9)):
        torch.manual_seed(seed)
        _, d_hidden, drawn = gradients(operands, settings, **keywords)
        draws.append(drawn)
    assert torch.equal(d_hidden, gradients(operands, LOSE, **keywords)[1])
    assert torch.equal(draws[0], draws[1])
    mean = torch.stack(draws[1:]).mean(0)
    assert distance(draws[0][:100], d_weight[:100]) < 1e-4  # frequent tokens
    error, of_mean = (distance(x[100:], d_weight[100:]) for x in (draws[0], mean))
    assert 1e-5 < error < 0.2 and of_mean < 0.6 * error


@BACKENDS
def test_the_other_linear_functions(backend) -> None:
    require_backend(backend)
    hidden, weight, targets = peaked()
    results = []
    for settings in (None, LOSE):
        x = hidden.clone().requires_grad_()
        keywords: dict[str, Any] = {"gradient_filter": settings, "backend": backend}
        out = fused_linear_token_loss(x, weight, targets, lambda p, h: -p, **keywords)
        assert (out.filter is None) == (settings is None) and len(out) == 4 + (settings is not None)
        out.loss.backward()
        y = hidden.clone().requires_grad_()
        (-linear_token_logprobs(y, weight, targets, **keywords)[0]).sum().backward()
        results.append((out.losses, x.grad, y.grad))
    (losses, exact, _), (same, filtered, recomputed) = results
    assert torch.equal(losses, same) and 1e-6 < distance(filtered, exact) < 0.1
    assert distance(recomputed, filtered) < 1e-5


def test_native_column_sums_equal_the_reference() -> None:
    require_backend("native")
    grad = torch.randn(37, 5003, generator=torch.Generator().manual_seed(0)) ** 5
    for columns in (5003, 4999, 16, 1):
        for threshold in (torch.tensor(1e3), torch.tensor(2.0), torch.tensor(0.0)):
            part = grad[:, :columns]
            hit, *sums = cpu.column_sums(part, threshold)
            expected, *exact = column_sums(part.double(), threshold)
            assert torch.equal(hit, expected)
            for x, y in zip(sums, exact, strict=True):
                assert torch.allclose(x.double(), y, rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": -1}, "GradientFilter eps=-1: use a number in"),
        ({"max_columns": 0}, "GradientFilter max_columns=0: use a number in"),
        ({"max_dropped": float("nan")}, "GradientFilter max_dropped=nan: use a number in"),
        ({"weight": 1}, "GradientFilter weight=1: use True or False"),
    ],
)
def test_settings_are_checked(settings, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        GradientFilter(**settings)
    with pytest.raises(TypeError, match="gradient_filter=True: use a gac_kernels.GradientFilter"):
        linear_token_logprobs(
            torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([1]), gradient_filter=True
        )
