"""K targets per token, against autograd on all logits in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gac_kernels import (
    fused_linear_token_loss,
    linear_token_logprobs,
    reference,
)
from gac_kernels.contract import MORE_OUTPUTS
from tests.kernels.cases import each_backend
from tests.kernels.emulated_gemm import emulate
from tests.kernels.test_linear import WorkCounter

B, T, H, V, K = 3, 6, 8, 37, 5
OPTIONS = {"plain": {}, "softcap": {"softcap": 2.0, "logit_scale": 1.3, "temperature": 0.7}}


def batch(dtype: torch.dtype = torch.float64, teacher_scale: float = 2.0) -> dict:
    """A batch with the teacher's likeliest tokens as targets."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    leaves = normal(B, T, H), normal(V, H), normal(V)
    teacher = (teacher_scale * normal(B, T, V)).log_softmax(-1)
    logps, ids = teacher.topk(K, -1)
    ids[1, 3:] = ids[0, 1, 0] = -100  # no loss
    ids[0, 0, 3:] = -100  # fewer candidates
    ids[2, 0, 2] = ids[2, 0, 1]  # the same candidate twice
    return {
        "leaves": [x.to(dtype).requires_grad_() for x in leaves],
        "targets": ids,
        "teacher_logps": logps.masked_fill(ids == -100, -math.inf).to(dtype),
        "weights": normal(B, T).to(dtype),
    }


def forward(logps: Tensor, entropy: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    p = teacher.exp()
    return weight * (p * torch.where(p > 0, teacher - logps, 0)).sum(-1)


def forward_with_rest(logps: Tensor, entropy: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    p, q = teacher.exp().sum(-1), torch.where(teacher > -math.inf, logps.exp(), 0).sum(-1)
    return forward(logps, entropy, teacher, weight) + (1 - p) * ((1 - p) / (1 - q)).abs().log()


def reverse(logps: Tensor, entropy: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    return weight * (logps.exp() * torch.where(teacher > -math.inf, logps - teacher, 0)).sum(-1)


def with_entropy(logps: Tensor, entropy: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    return reverse(logps, entropy, teacher, weight) - 0.1 * entropy


FUNCTIONS = (forward, forward_with_rest, reverse, with_entropy)


def evaluate(call: Callable, function: Callable, x: dict, **keywords) -> tuple[Tensor, ...]:
    """The outputs and the gradients of hidden, weight and bias."""
    hidden, weight, bias = x["leaves"]
    inputs = x["teacher_logps"], x["weights"]
    out = call(hidden, weight, x["targets"], function, *inputs, bias=bias, **keywords)
    return *out, *torch.autograd.grad(3 * out[0], x["leaves"])


def doubled(x: dict) -> dict:
    """The same batch in float64."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in x["leaves"]]
    return x | {"leaves": leaves, **{k: x[k].double() for k in ("teacher_logps", "weights")}}


def assert_as_accurate(fused, plain, exact) -> None:
    """Twice the error of the reference in the same dtype, and the results' own rounding."""
    for a, b, c in zip(fused, plain, exact, strict=True):
        error, allowed = ((y.double() - c).norm() for y in (a, b))
        assert error <= 2 * allowed + 4 * torch.finfo(a.dtype).eps * c.norm() + 1e-7


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_equals_autograd_in_float64(function, options) -> None:
    x = batch()
    expected = evaluate(reference.fused_linear_token_loss, function, x, **options)
    for chunk_bytes in (None, 3 * 8 * V):
        actual = evaluate(fused_linear_token_loss, function, x, chunk_bytes=chunk_bytes, **options)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [forward_with_rest, with_entropy])
def test_is_as_accurate_as_the_reference(function, dtype, backend) -> None:
    x = batch(dtype)
    exact = evaluate(reference.fused_linear_token_loss, function, doubled(x))
    plain = evaluate(reference.fused_linear_token_loss, function, x)
    fused = evaluate(fused_linear_token_loss, function, x, backend=backend)
    assert_as_accurate(fused, plain, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sure_model_keeps_its_gradient_in_half_precision(dtype, monkeypatch) -> None:
    """Where p is near 1, f (1 - p) is small: a difference of two rounded numbers would lose it."""
    x = batch(dtype)
    with torch.no_grad():
        x["leaves"][2][x["targets"][0, 2, 0]] += 30
    exact = evaluate(reference.fused_linear_token_loss, forward, doubled(x))
    emulate(monkeypatch, dtype)
    fused = evaluate(fused_linear_token_loss, forward, x)
    for a, b in zip(fused[4:], exact[4:], strict=True):
        assert (a.double() - b).norm() <= 8 * torch.finfo(dtype).eps * b.norm()


@each_backend
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_log_probs_and_their_gradients(backend, options) -> None:
    x = batch(torch.float32)
    results = []
    for call, data in (
        (reference.linear_token_logprobs, doubled(x)),
        (reference.linear_token_logprobs, x),
        (lambda *a, **k: linear_token_logprobs(*a, **k, backend=backend), x),
    ):
        hidden, weight, bias = data["leaves"]
        out = call(hidden, weight, data["targets"], bias=bias, outputs=MORE_OUTPUTS, **options)
        total = (data["weights"][..., None] * out[0].exp()).sum() - (0.1 * out[1]).sum()
        results.append((*(o.float() for o in out), *torch.autograd.grad(total, data["leaves"])))
    exact, plain, fused = ([r.double() for r in result] for result in results)
    assert fused[0].shape == (B, T, K)
    for a, b, c in zip(fused, plain, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-6 * c.norm()


def test_k_of_one_equals_a_single_target() -> None:
    x = batch(torch.float32)
    hidden, weight, bias = x["leaves"]
    first = x["targets"][..., 0]
    single = linear_token_logprobs(hidden, weight, first, bias=bias)
    several = linear_token_logprobs(hidden, weight, first[..., None], bias=bias)
    torch.testing.assert_close(several[0][..., 0], single[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(several[1], single[1])


def test_packed_rows_equal_padded_ones() -> None:
    x = batch()
    padded = evaluate(fused_linear_token_loss, with_entropy, x)
    hidden, weight, bias = x["leaves"]
    flat = x | {k: x[k].flatten(0, 1) for k in ("targets", "teacher_logps", "weights")}
    flat["leaves"] = [hidden.detach().flatten(0, 1).requires_grad_(), weight, bias]
    for a, b in zip(evaluate(fused_linear_token_loss, with_entropy, flat), padded, strict=True):
        assert torch.equal(a.reshape(b.shape), b)


def test_a_missing_candidate_has_log_prob_0_and_no_gradient() -> None:
    x = batch()
    hidden, weight, bias = x["leaves"]
    logps, _ = linear_token_logprobs(hidden, weight, x["targets"], bias=bias)
    assert (logps[0, 0, 3:] == 0).all()
    (grad,) = torch.autograd.grad(logps[0, 0, 3:].sum(), hidden)
    assert (grad == 0).all()


def test_rows_without_a_loss() -> None:
    x = batch()
    _, losses, logps, entropy, d_hidden, *_ = evaluate(fused_linear_token_loss, with_entropy, x)
    dead = x["targets"][..., 0] == -100
    for tensor in (losses, logps, entropy, d_hidden):
        assert (tensor[dead] == 0).all()


def test_rows_without_a_loss_in_a_cuda_graph(monkeypatch) -> None:
    """While a graph is captured, no count can be read, and every row is computed."""
    x = batch()
    expected = evaluate(fused_linear_token_loss, with_entropy, x)
    monkeypatch.setattr("gac_kernels.tokens.capturing", lambda device: True)
    with torch.no_grad():
        x["leaves"][0][0, 1] = math.nan  # a row without a loss
    for a, b in zip(evaluate(fused_linear_token_loss, with_entropy, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("where", [(0, 0), (0, 1)])
def test_nan_in_hidden(where) -> None:
    x = batch(torch.float32)
    with torch.no_grad():
        x["leaves"][0][where] = math.nan
    out = evaluate(fused_linear_token_loss, reverse, x)
    assert out[0].isnan() == (where == (0, 0))


def test_all_masked_and_no_token() -> None:
    x = batch() | {"targets": torch.full((B, T, K), -100)}
    for tensor in evaluate(fused_linear_token_loss, forward, x):
        assert (tensor == 0).all()
    hidden, weight, _ = x["leaves"]
    logps, entropy = linear_token_logprobs(hidden[:0], weight, x["targets"][:0])
    assert logps.shape == (0, T, K)
    assert entropy.shape == (0, T)


def test_work() -> None:
    """6 N H V FLOPs, whatever K; 2 N H V without a gradient."""
    x = batch()
    live = int((x["targets"][..., 0] != -100).sum())
    for grad, factor in ((True, 6), (False, 2)):
        with WorkCounter() as work, torch.set_grad_enabled(grad):
            hidden, weight, bias = x["leaves"]
            inputs = x["teacher_logps"], x["weights"]
            fused_linear_token_loss(hidden, weight, x["targets"], forward, *inputs, bias=bias)
        assert work.flops == factor * live * H * V
    with WorkCounter() as work, torch.no_grad():
        linear_token_logprobs(hidden, weight, x["targets"])
    assert work.flops == 2 * live * H * V


def test_compiled() -> None:
    x = batch(torch.float32)
    hidden, weight, bias = x["leaves"]

    def total(call: Callable) -> Tensor:
        logps, entropy = call(hidden, weight, x["targets"], bias=bias)
        return (logps.exp().sum(-1) - entropy).sum()

    compiled = torch.compile(lambda: total(linear_token_logprobs), backend="aot_eager")
    expected = torch.autograd.grad(total(linear_token_logprobs), x["leaves"])
    for a, b in zip(torch.autograd.grad(compiled(), x["leaves"]), expected, strict=True):
        assert torch.equal(a, b)


ERRORS = {
    "targets[0, 0, 2] = 37: use a token in [0, 37)": {"id": V},
    "targets has shape [3, 6, 0]: give at least one target": {
        "targets": torch.zeros(B, T, 0).long()
    },
    "inputs[0] has shape [3, 6, 4]": {"teacher_logps": torch.zeros(B, T, 4)},
    "targets has shape [3, 5]": {"targets": torch.zeros(B, T - 1, K).long()},
}


@pytest.mark.parametrize(("message", "change"), ERRORS.items(), ids=list(ERRORS))
def test_errors_name_the_argument(message: str, change: dict) -> None:
    x = batch()
    if "id" in change:
        x["targets"][0, 0, 2] = change["id"]
    x |= {k: v for k, v in change.items() if k in x}
    with pytest.raises(ValueError) as error:
        evaluate(fused_linear_token_loss, forward, x)
    assert str(error.value).startswith(message)
