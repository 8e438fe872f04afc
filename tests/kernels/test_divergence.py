"""`fused_linear_divergence` against autograd on all logits in float64."""

import math

import pytest
import torch

from gac_kernels import fused_linear_divergence, reference
from gac_kernels.divergence import DIVERGENCES
from tests.kernels.cases import each_backend
from tests.kernels.emulated_gemm import emulate
from tests.kernels.test_linear import WorkCounter

B, T, H, H_T, V = 3, 5, 8, 12, 37
OPTIONS = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 1.3, "teacher_logit_scale": 0.6},
    "softcaps": {"softcap": 2.0, "teacher_softcap": 3.0, "logit_scale": 1.5},
}


def batch(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> dict:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    targets = torch.randint(V, (B, T), generator=g)
    targets[1, 3:] = targets[0, 1] = -100
    return {
        "hidden": (scale * normal(B, T, H)).requires_grad_(),
        "weight": normal(V, H).requires_grad_(),
        "teacher_hidden": scale * normal(B, T, H_T),
        "teacher_weight": normal(V, H_T),
        "bias": normal(V).requires_grad_(),
        "teacher_bias": normal(V),
        "targets": targets,
        "token_weights": normal(B, T),
    }


def evaluate(function, x: dict, **keywords) -> tuple[torch.Tensor, ...]:
    """The outputs and the gradients of hidden, weight and bias."""
    out = function(**x, **keywords)
    leaves = [v for v in x.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    return *out, *torch.autograd.grad(3 * out.loss, leaves)


def doubled(x: dict) -> dict:
    """The same batch in float64."""
    return {
        k: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
        for k, v in x.items()
    }


def assert_as_accurate(fused, plain, exact) -> None:
    """Twice the error of the reference in the same dtype, and the results' own rounding.

    The loss may be off by the sum of its tokens' errors, which cancel by chance.
    """
    error, allowed = ((x[1].double() - exact[1]).abs().sum() for x in (fused, plain))
    assert (fused[0] - exact[0]).abs() <= 8 * (error + allowed)
    for a, b, c in zip(fused[1:], plain[1:], exact[1:], strict=True):
        error, allowed = ((y.double() - c).norm() for y in (a, b))
        assert error <= 2 * allowed + 2 * torch.finfo(a.dtype).eps * c.norm()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equals_autograd_in_float64(divergence, options):
    x = batch()
    expected = evaluate(reference.linear_divergence, x, divergence=divergence, beta=0.3, **options)
    for chunk_bytes in (None, 3 * 8 * V):
        actual = evaluate(
            fused_linear_divergence,
            x,
            divergence=divergence,
            beta=0.3,
            chunk_bytes=chunk_bytes,
            **options,
        )
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_is_as_accurate_as_the_reference(divergence, dtype, backend):
    x = batch(dtype)
    exact = evaluate(reference.linear_divergence, doubled(x), divergence=divergence)
    plain = evaluate(reference.linear_divergence, x, divergence=divergence)
    fused = evaluate(fused_linear_divergence, x, divergence=divergence, backend=backend)
    assert_as_accurate(fused, plain, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_half_precision_gemms_of_a_gpu(divergence, dtype, monkeypatch):
    """Tiny weights do not vanish in float16, whose smallest number is 6e-8."""
    x = batch(dtype)
    x["token_weights"] = torch.full((B, T), 2.0**-30)
    exact = evaluate(reference.linear_divergence, doubled(x), divergence=divergence)
    emulate(monkeypatch, dtype)
    fused = evaluate(fused_linear_divergence, x, divergence=divergence)
    for a, b in zip(fused[3:], exact[3:], strict=True):
        # rounded once more than the operands: the gradient of the logits
        assert (a.double() - b).norm() <= 8 * torch.finfo(dtype).eps * b.norm() + 2.0**-24 * (
            dtype == torch.float16
        )


@pytest.mark.parametrize("temperature_shape", [(B,), (B, T)])
def test_a_temperature_per_sequence_or_token(temperature_shape):
    x = batch() | {"temperature": torch.rand(temperature_shape, dtype=torch.float64) + 0.5}
    expected = evaluate(reference.linear_divergence, x)
    for a, b in zip(evaluate(fused_linear_divergence, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_packed_rows_equal_padded_ones():
    x = batch()
    padded = evaluate(fused_linear_divergence, x)
    flat = {k: x[k].detach().flatten(0, 1) for k in ("hidden", "teacher_hidden")}
    flat["hidden"].requires_grad_()
    flat |= {k: x[k].flatten() for k in ("targets", "token_weights")}
    packed = evaluate(fused_linear_divergence, {**x, **flat})
    for a, b in zip(packed, padded, strict=True):
        assert torch.equal(a, b.view_as(a))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_of_a_model_with_itself_is_zero(divergence):
    x = batch(torch.float32)
    same = {"teacher_hidden": x["hidden"], "teacher_weight": x["weight"], "teacher_bias": x["bias"]}
    out = fused_linear_divergence(**x | same, divergence=divergence)
    assert out.losses.abs().max() < 1e-6
    assert out.entropy.max() > 0.5


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_peaked_distributions(divergence):
    """Probabilities that underflow in float32."""
    x = batch(torch.float32, scale=60.0)
    exact = evaluate(reference.linear_divergence, doubled(x), divergence=divergence)
    plain = evaluate(reference.linear_divergence, x, divergence=divergence)
    assert_as_accurate(evaluate(fused_linear_divergence, x, divergence=divergence), plain, exact)


def masked(x: dict, student: bool, teacher: bool) -> dict:
    """Mask the last vocabulary entry of a model."""
    for name, mask in (("bias", student), ("teacher_bias", teacher)):
        value = x[name].detach().clone()
        value[-1] = -math.inf if mask else value[-1]
        x[name] = value
    return x


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_an_entry_that_both_models_mask(divergence):
    x = masked(batch(), student=True, teacher=True)
    cut = dict(x)
    for name in ("weight", "teacher_weight", "bias", "teacher_bias"):
        cut[name] = x[name][:-1]
    cut["targets"] = x["targets"].clamp(max=V - 2)
    expected = fused_linear_divergence(**cut, divergence=divergence)
    out = fused_linear_divergence(**x, divergence=divergence)
    torch.testing.assert_close(out.losses, expected.losses, rtol=1e-12, atol=1e-14)
    (grad,) = torch.autograd.grad(out.loss, x["hidden"])
    assert grad.isfinite().all()


@pytest.mark.parametrize("student", [True, False])
def test_an_entry_that_one_model_masks(student):
    x = masked(batch(torch.float32), student=student, teacher=not student)
    infinite, finite = ("forward_kl", "reverse_kl") if student else ("reverse_kl", "forward_kl")
    live = x["targets"] != -100
    assert (fused_linear_divergence(**x, divergence=infinite).losses[live] == math.inf).all()
    for divergence in (finite, "jsd"):
        out = fused_linear_divergence(**x, divergence=divergence)
        assert out.losses.isfinite().all()
        (grad,) = torch.autograd.grad(out.loss, x["hidden"])
        assert grad.isfinite().all()


@pytest.mark.parametrize("model", ["hidden", "teacher_hidden"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_nan_and_infinity(divergence, value, model):
    """A row with a loss gives a nan loss; a row without one is never read."""
    x = batch(torch.float32)
    for where, wrong in (((0, 0), True), ((0, 1), False)):
        broken = x[model].detach().clone()
        broken[where] = value
        out = fused_linear_divergence(**{**x, model: broken}, divergence=divergence)
        assert out.loss.isnan() == wrong
        assert out.losses[0, 1] == 0


def test_rows_without_a_loss_or_a_weight():
    x = batch()
    x["token_weights"][0, 0] = 0
    *_, d_hidden, _, _ = evaluate(fused_linear_divergence, x)
    assert (d_hidden[x["targets"] == -100] == 0).all()
    assert (d_hidden[0, 0] == 0).all()
    assert fused_linear_divergence(**x).losses[0, 0] > 0  # the divergences have no weight


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_without_a_loss_in_a_cuda_graph(divergence, monkeypatch):
    """While a graph is captured, no count can be read, and every row is computed."""
    x = batch()
    x["token_weights"][0, 0] = 0
    expected = evaluate(fused_linear_divergence, x, divergence=divergence)
    monkeypatch.setattr("gac_kernels.tokens.capturing", lambda device: True)
    for model in ("hidden", "teacher_hidden"):
        with torch.no_grad():
            x[model][0, 1] = math.nan  # a row without a loss
    actual = evaluate(fused_linear_divergence, x, divergence=divergence)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, H), (1, H)])
def test_no_token_and_one_token(shape):
    x = batch()
    cut = {k: x[k].detach().flatten(0, 1)[: shape[0]] for k in ("hidden", "teacher_hidden")}
    cut["hidden"].requires_grad_()
    out = fused_linear_divergence(**cut, weight=x["weight"], teacher_weight=x["teacher_weight"])
    out.loss.backward()
    assert out.losses.shape == shape[:1]
    assert (out.loss > 0) == (shape[0] > 0)
    assert cut["hidden"].grad.shape == shape


def test_all_masked():
    x = batch() | {"targets": torch.full((B, T), -100)}
    loss, losses, entropy, *grads = evaluate(fused_linear_divergence, x)
    for tensor in (loss, losses, entropy, *grads):
        assert (tensor == 0).all()


def test_work():
    """6 N H V + 2 N H_t V FLOPs; a token of weight 0 needs no backward GEMM, a frozen head none."""
    x = batch()
    live, dead = int((x["targets"] != -100).sum()), 4
    with WorkCounter() as work:
        fused_linear_divergence(**x).loss.backward()
    assert work.flops == live * V * (6 * H + 2 * H_T)
    x["token_weights"].view(-1)[(x["targets"] != -100).view(-1).nonzero()[:dead]] = 0
    with WorkCounter() as work:
        fused_linear_divergence(**x).loss.backward()
    assert work.flops == V * (live * (2 * H + 2 * H_T) + (live - dead) * 4 * H)
    with WorkCounter() as work, torch.no_grad():
        fused_linear_divergence(**x)
    assert work.flops == live * V * (2 * H + 2 * H_T)


def test_compiled():
    x = batch(torch.float32)
    compiled = torch.compile(fused_linear_divergence, backend="aot_eager")
    for a, b in zip(evaluate(compiled, x), evaluate(fused_linear_divergence, x), strict=True):
        assert torch.equal(a, b)


def test_a_teacher_of_another_dtype():
    x = batch(torch.float32)
    half = {k: x[k].bfloat16() for k in ("teacher_hidden", "teacher_weight", "teacher_bias")}
    out = fused_linear_divergence(**{**x, **half})
    exact = reference.linear_divergence(**doubled({**x, **half}))
    torch.testing.assert_close(out.losses.double(), exact.losses, rtol=1e-4, atol=1e-5)


ERRORS = {
    "divergence='kl': use one of forward_kl, reverse_kl, jsd": {"divergence": "kl"},
    "beta=1.0: use a number in (0, 1)": {"divergence": "jsd", "beta": 1.0},
    "teacher_hidden has shape [3, 4, 12]: expected [3, 5, H_t]": {
        "teacher_hidden": torch.zeros(3, 4, 12, dtype=torch.float64)
    },
    "teacher_weight has 30 rows, weight has 37": {
        "teacher_weight": torch.zeros(30, H_T, dtype=torch.float64),
        "teacher_bias": None,
    },
    "teacher_weight has dtype torch.float32": {"teacher_weight": torch.zeros(V, H_T)},
    "teacher_logit_scale=0: use a finite number > 0": {"teacher_logit_scale": 0},
    "teacher_softcap=-1: use a finite number > 0": {"teacher_softcap": -1},
    "token_weights[0, 2] = nan: use finite numbers": {
        "token_weights": torch.zeros(B, T).index_fill(1, torch.tensor([2]), math.nan)
    },
    "token_weights has shape [3]": {"token_weights": torch.ones(B)},
    "temperature=0: use a finite number > 0": {"temperature": 0},
}


@pytest.mark.parametrize(("message", "change"), ERRORS.items(), ids=list(ERRORS))
def test_errors_name_the_argument(message, change):
    with pytest.raises((TypeError, ValueError)) as error:
        fused_linear_divergence(**batch() | change)
    assert str(error.value).startswith(message)
