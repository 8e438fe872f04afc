"""The gradient filter against exact gradients: bounds, the bias of a sum, exact chunks, reports."""

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
from gac_kernels.backends import load
from gac_kernels.tokens import RowMarks, Scaling, Upstream

N, H, V = 192, 32, 3001
LOSE = GradientFilter(eps=2**-9, max_dropped=0.5)  # drops much, so that errors are visible
SOME_BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        *("reference", "native"),
        pytest.param("triton", marks=pytest.mark.full(reason="seconds; the other tests have it")),
    ],
    indirect=True,
)
CPU_BACKENDS = pytest.mark.parametrize("backend", ["reference", "native"], indirect=True)
CPU = torch.device("cpu")
CASES: list[dict[str, Any]] = [
    {},
    {"softcap": 15.0},
    {"spec": LossSpec(entropy_coef=0.05)},
    {"bias": torch.zeros(V)},
    {"old_logps": torch.tensor([-5.0] * 4 + [0] * 3 + [-20] + [0] * 4)},  # sequence 7 is clipped
]
CASES.append({key: value for case in CASES for key, value in case.items()})  # all at once


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


def rows_for(backend: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """The operands; fewer rows for Triton, whose interpreter is slow."""
    hidden, weight, targets = peaked(dtype=dtype)
    count = 24 if backend == "triton" else N
    return hidden[:count], weight, targets[:count]


def gradients(
    operands: tuple[Tensor, Tensor, Tensor],
    lowest: float = -1.0,  # advantage
    frozen: bool = False,
    old_logps: Tensor | None = None,  # [12]
    **keywords: Any,
) -> tuple[Any, Any, Any]:
    """The output of a batch of 12 rollouts with mixed advantages, and both gradients."""
    hidden, weight, targets = operands
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    advantages = torch.linspace(lowest, 2, 12)
    advantages[3] = 0  # rows without a gradient
    out = fused_linear_gac_loss(
        leaves[0].view(12, -1, H),
        leaves[1],
        targets.view(12, -1),
        advantages,
        old_logps=None if old_logps is None else old_logps[:, None].expand(12, len(targets) // 12),
        **keywords,
    )
    out.loss.backward()
    return out, leaves[0].grad, leaves[1].grad


def distance(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("backend", "keywords"),
    [
        *((name, case) for name in ("reference", "native") for case in CASES[:-1]),
        ("triton", CASES[-1]),
    ],
    indirect=["backend"],
)
def test_only_the_gradient_of_hidden_changes_and_its_errors_do_not_add_up(
    backend, keywords, poison
) -> None:
    operands = rows_for(backend)
    exact, d_hidden, d_weight = gradients(operands, backend=backend, **keywords)
    out, filtered, same = gradients(operands, gradient_filter=LOSE, backend=backend, **keywords)
    assert isinstance(out.filter, FilterReport)
    assert exact.filter is None
    assert 0 < out.filter.kept_columns < 0.5
    assert 0 < out.filter.dropped_mass <= 1
    assert torch.equal(same, d_weight)
    assert torch.equal(out.loss, exact.loss)
    assert torch.equal(out.logps, exact.logps)
    assert torch.equal(out.moments.rollouts, exact.moments.rollouts)
    error = filtered - d_hidden
    assert 1e-5 < distance(filtered, d_hidden) < 0.1
    assert error.sum(0).norm() < 3 * error.norm()  # at random signs 1 times, coherent 14 times
    if "spec" not in keywords:  # without a gradient: no advantage, or clipped
        assert filtered.view(12, -1, H)[[3, 7] if "old_logps" in keywords else 3].abs().max() == 0
    plain, expected, _ = gradients(operands, gradient_filter=LOSE, backend="reference", **keywords)
    assert torch.equal(out.filter.kept_columns, plain.filter.kept_columns)
    assert distance(filtered, expected) < 1e-5


def test_the_error_is_bounded_by_the_dropped_gradient_which_is_reported() -> None:
    """||error of dH|| <= ||D - d q^T||_F ||W||_2, with D the dropped entries, in float64."""
    hidden, weight, targets = operands = peaked(4.0, torch.float64)
    _, d_hidden, _ = gradients(operands, lowest=0.5)
    chunk = 44  # rows: a quarter of those with a gradient; the limit is a multiple of 16
    out, filtered, _ = gradients(operands, lowest=0.5, gradient_filter=LOSE, chunk_bytes=48 * V * 8)
    p = (hidden @ weight.T).softmax(-1)
    live = torch.arange(N) // (N // 12) != 3
    scale = torch.linspace(0.5, 2, 12).double().repeat_interleave(N // 12) / N
    grad = ((p - torch.nn.functional.one_hot(targets, V)) * scale[:, None])[live]
    marked = (p > LOSE.eps).scatter(1, targets[:, None], True)[live]
    kept = torch.cat([x.any(0).expand_as(x) for x in marked.split(chunk)])
    dropped = grad.masked_fill(kept, 0)
    # the tail at most doubles the dropped part
    assert 0 < (filtered - d_hidden).norm() < 2 * dropped.norm() * torch.linalg.norm(weight, 2)
    plain = d_hidden[live] - dropped @ weight  # without the tail, the errors add up over the rows
    assert distance(filtered.sum(0), d_hidden.sum(0)) < distance(plain.sum(0), d_hidden.sum(0)) / 3
    shares = kept.double().mean(), (dropped.abs().sum(1) / grad.abs().sum(1)).max()
    torch.testing.assert_close(out.filter, FilterReport(*shares), check_dtype=False)


@SOME_BACKENDS
def test_no_filter_eps_0_flat_rows_and_many_columns_are_exact(backend, monkeypatch) -> None:
    monkeypatch.setattr("gac_kernels.filter.SAMPLE", 8)
    hidden, weight, targets = operands = [x[:12] if len(x) == N else x for x in peaked()]
    half_flat = hidden * (torch.arange(12) < 9)[:, None]  # the first rows would be filtered
    for settings, inputs in (
        (None, operands),
        (GradientFilter(eps=0, weight=True), operands),
        (GradientFilter(eps=2**-90), operands),  # every column is kept
        (GradientFilter(max_columns=1e-4), operands),
        (GradientFilter(eps=2**-9, max_dropped=0), operands),
        (GradientFilter(), (0 * hidden, weight, targets)),
        (GradientFilter(eps=2**-9, max_dropped=0.3), (half_flat, weight, targets)),
    ):
        if settings is None or inputs is not operands:
            _, d_hidden, d_weight = gradients(inputs, backend=backend)
        out, same, also = gradients(inputs, gradient_filter=settings, backend=backend)
        assert out.filter == (settings and FilterReport(torch.tensor(1.0), torch.tensor(0.0)))
        assert torch.equal(same, d_hidden)
        assert torch.equal(also, d_weight)


@CPU_BACKENDS
@pytest.mark.parametrize("rows", [None, 64])  # of a chunk: all, or a third
def test_the_error_of_the_weight_averages_out(backend, rows) -> None:
    operands, chunk_bytes = peaked(), rows and rows * V * 4
    keywords = {"backend": backend, "chunk_bytes": chunk_bytes}
    biases = [torch.zeros(V, requires_grad=True) for _ in range(2)]
    _, _, d_weight = gradients(operands, bias=biases[0], **keywords)
    settings = replace(LOSE, weight=True)
    gradients(operands, bias=biases[1], gradient_filter=settings, **keywords)
    assert torch.equal(biases[1].grad, biases[0].grad)  # is never filtered
    draws = []
    for seed in (0, 0, *range(1, 9)):
        torch.manual_seed(seed)
        _, d_hidden, drawn = gradients(operands, gradient_filter=settings, **keywords)
        draws.append(drawn)
    assert torch.equal(d_hidden, gradients(operands, gradient_filter=LOSE, **keywords)[1])
    assert torch.equal(draws[0], draws[1])
    mean = torch.stack(draws[1:]).mean(0)
    assert distance(draws[0][:100], d_weight[:100]) < 1e-4  # frequent tokens
    error, of_mean = (distance(x[100:], d_weight[100:]) for x in (draws[0], mean))
    assert 1e-5 < error < 0.2
    assert of_mean < 0.6 * error


@CPU_BACKENDS
def test_an_exact_chunk_leaves_no_marks_to_the_next_one(backend) -> None:
    hidden, weight, targets = peaked()
    hidden[:48] = 0  # the first of four chunks keeps every column
    keywords = {"gradient_filter": GradientFilter(), "chunk_bytes": 48 * V * 4}
    out, _, _ = gradients((hidden, weight, targets), backend=backend, **keywords)
    assert 0.25 < out.filter.kept_columns < 0.9


@SOME_BACKENDS
def test_the_other_linear_functions(backend) -> None:
    hidden, weight, targets = rows_for(backend)
    results = []
    for settings in (None, LOSE):
        x = hidden.clone().requires_grad_()
        keywords: dict[str, Any] = {"gradient_filter": settings, "backend": backend}
        out = fused_linear_token_loss(x, weight, targets, lambda p, h: -p, **keywords)
        assert (out.filter is None) == (settings is None)
        assert len(out) == 4 + (settings is not None)
        out.loss.backward()
        y = hidden.clone().requires_grad_()
        (-linear_token_logprobs(y, weight, targets, **keywords)[0]).sum().backward()
        results.append((out.losses, x.grad, y.grad))
    (losses, exact, _), (same, filtered, recomputed) = results
    assert torch.equal(losses, same)
    assert 1e-6 < distance(filtered, exact) < 0.1
    assert distance(recomputed, filtered) < 1e-5


@SOME_BACKENDS
def test_float16_and_a_frozen_head(backend) -> None:
    """The scaling of float16 gradients cancels; the other results do not depend on the filter."""
    half = rows_for(backend, torch.float16)
    wide = half[0].float(), half[1].float(), half[2]
    _, d_hidden, d_weight = gradients(half, backend=backend)
    out, filtered, same = gradients(half, gradient_filter=LOSE, backend=backend)
    expected, d_wide, _ = gradients(wide, gradient_filter=LOSE, backend=backend)
    assert torch.equal(same, d_weight)
    assert torch.equal(out.filter.kept_columns, expected.filter.kept_columns)
    assert 1e-5 < distance(filtered.float(), d_hidden.float()) < 0.1
    assert distance(filtered.float(), d_wide) < 2e-3
    _, d_frozen, none = gradients(wide, gradient_filter=LOSE, frozen=True, backend=backend)
    assert torch.equal(d_frozen, d_wide)
    assert none is None


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *((name, torch.float32) for name in ("reference", "native", "triton")),
        ("reference", torch.bfloat16),
        ("triton", torch.bfloat16),  # a CPU stores the gradient of a head in float32
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_row_kernels_mark_what_they_store(backend, dtype, softcap, poison) -> None:
    """Against float64, for odd sizes, strided rows, and rows without a loss or a gradient."""
    rows, width = load(backend, CPU), 301
    logits = 2 * torch.randn(1, 7, width)
    targets = torch.tensor([0, 300, -100, 5, -1, 9, 301])  # outside: of another rank's part
    a, b = torch.tensor([1, 0.5, 1, 0, 0.01, 0, 2]), torch.tensor([0, 0.1, 0, 0, 0.2, -1, 0])
    temperature = torch.linspace(0.5, 2, 7)
    scaling = Scaling(temperature, softcap)
    _, entropy, lse = rows.row_stats(logits, targets, scaling)
    wide = torch.full((1, 7, width + 6), 7.0, dtype=dtype)
    flags = torch.zeros(width + 2, dtype=torch.bool)  # with one on either side
    marks = RowMarks(0.0079, flags[1:-1], torch.zeros(2, 7))
    upstream, out = Upstream(lse, entropy, a, b), wide[..., :width]
    rows.row_grads(logits, targets, scaling, upstream, out, whole_row=False, marks=marks)
    threshold = marks.eps * ((a.abs() + b.abs()) / temperature)[:, None].double()
    stored = wide[0, :, :width].double()
    expected = (stored.abs() > threshold).any(0).index_fill(0, torch.tensor([0, 300, 9]), True)
    assert torch.equal(marks.hit, expected)
    assert 3 < flags.sum() == expected.sum() < width - 3
    torch.testing.assert_close(
        marks.sums.double(), torch.stack([stored.sum(1), stored.abs().sum(1)]), rtol=1e-5, atol=1e-6
    )
    assert (marks.sums[:, 2:4] == 0).all()
    assert (wide[..., width:] == 7).all()


def test_settings_are_checked() -> None:
    for settings, message in (
        ({"eps": -1}, "GradientFilter eps=-1: use a number in \\[0, 1]"),
        ({"eps": True}, "GradientFilter eps=True: use a number in \\[0, 1]"),
        ({"max_columns": 0}, "GradientFilter max_columns=0: use a number in \\(0, 1]"),
        ({"max_dropped": float("nan")}, "GradientFilter max_dropped=nan: use a number in"),
        ({"weight": 1}, "GradientFilter weight=1: use True or False"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            GradientFilter(**settings)
    with pytest.raises(TypeError, match="gradient_filter=True: use a gac_kernels.GradientFilter"):
        linear_token_logprobs(
            torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([1]), gradient_filter=True
        )
