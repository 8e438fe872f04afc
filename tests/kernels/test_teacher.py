"""The teacher's term of the mixed loss; `test_options.py` compares random losses with an oracle."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gac_kernels import (
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
    loss_from_logprobs,
    reference,
)
from gac_kernels.contract import TOP_K_LOSSES
from tests.kernels.cases import check, check_grads, each_backend
from tests.kernels.emulated_gemm import emulate
from tests.kernels.test_linear import WorkCounter

B, T, H, V, K = 4, 5, 8, 37, 6
LOSSES = ("k1", "k2", "k3", *TOP_K_LOSSES)
each_loss = pytest.mark.parametrize("loss", LOSSES)


def batch(loss: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Three rollouts, of which one is empty, and a demonstration."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    targets = torch.randint(V, (B, T), generator=g)
    targets[0, 3:] = targets[2] = -100
    found, ids = (2 * normal(B, T, V)).log_softmax(-1).topk(K, -1)
    ids[0, 0, 4:] = ids[1, 1, 0] = -100  # fewer tokens, and none
    teacher: dict[str, Tensor] = {"teacher_logps": -normal(B, T).abs() - 2}
    if loss in TOP_K_LOSSES:
        teacher = {"teacher_logps": found, "teacher_ids": ids}
    teacher["teacher_logps"][targets == -100] = math.nan
    teacher["teacher_logps"][3] = math.nan  # not read for the demonstration
    return {
        "leaves": [x.to(dtype).requires_grad_() for x in (normal(B, T, H), normal(V, H))],
        "inputs": (targets, torch.tensor([1.0, -0.5, 1.0, 0.0]), torch.arange(B) == 3),
        "keywords": {"mu": 0.4, "spec": LossSpec(teacher_coef=0.7, teacher_loss=loss), **teacher},
    }


def evaluate(call: Any, x: dict[str, Any], **keywords: Any) -> tuple[Any, list[Tensor]]:
    """The outputs and the gradients of hidden and weight."""
    out = call(*x["leaves"], *x["inputs"], **x["keywords"] | keywords)
    return out, list(torch.autograd.grad(3 * out.loss, x["leaves"]))


def doubled(x: dict[str, Any]) -> dict[str, Any]:
    """The same batch in float64."""
    return x | {"leaves": [leaf.detach().double().requires_grad_() for leaf in x["leaves"]]}


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["k3", *TOP_K_LOSSES])
def test_is_as_accurate_as_the_reference(loss: str, dtype: torch.dtype, backend: str) -> None:
    x = batch(loss, dtype)
    truth, d_truth = evaluate(reference.fused_linear_gac_loss, doubled(x))
    plain, d_plain = evaluate(reference.fused_linear_gac_loss, x)
    fused, d_fused = evaluate(fused_linear_gac_loss, x, backend=backend)
    for name in ("loss", "rollout_loss", "demo_loss", "teacher_loss", "logps", "entropy"):
        check(name, *(getattr(out, name) for out in (fused, plain, truth)), floor=1.0)
    eps = torch.finfo(dtype).eps
    check_grads(["hidden", "weight"], d_fused, d_plain, d_truth, eps)


def sure(x: dict[str, Any], factor: float) -> None:
    """Make the student sure of the teacher's likeliest token at one position."""
    ids = x["keywords"]["teacher_ids"]
    with torch.no_grad():
        x["leaves"][1][ids[0, 1, 0]] += factor * x["leaves"][0][0, 1]


@each_backend
@pytest.mark.parametrize("loss", TOP_K_LOSSES)
def test_a_sure_student(loss: str, backend: str) -> None:
    """The probability of its rest is below float32's rounding of 1."""
    x = batch(loss)
    sure(x, 3.0)
    truth, d_truth = evaluate(reference.fused_linear_gac_loss, doubled(x))
    logps, _ = reference.linear_token_logprobs(
        *doubled(x)["leaves"], x["keywords"]["teacher_ids"][:1]
    )
    assert 0 < 1 - logps[0, 1].exp().sum() < 1e-7
    fused, d_fused = evaluate(fused_linear_gac_loss, x, backend=backend)
    torch.testing.assert_close(
        fused.teacher_loss.double(), truth.teacher_loss, rtol=1e-5, atol=1e-6
    )
    for a, b in zip(d_fused, d_truth, strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", TOP_K_LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tiny_weights_in_half_precision(
    loss: str, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss divided by 1e6 and multiplied later, as by a trainer's loss scale; a sure student."""
    x = batch(loss, dtype)
    sure(x, 4.0)
    x["keywords"] |= {"rollout_norm": 1e6, "demo_norm": 1e6, "old_logps": torch.full((B, T), -3.0)}
    x["keywords"]["spec"] = LossSpec(
        teacher_coef=0.7, teacher_loss=loss, importance_sampling_level=level
    )
    _, exact = evaluate(reference.fused_linear_gac_loss, doubled(x))
    emulate(monkeypatch, dtype)
    out = fused_linear_gac_loss(*x["leaves"], *x["inputs"], **x["keywords"])
    grads = torch.autograd.grad(3e6 * out.loss, x["leaves"])
    for a, b in zip(grads, exact, strict=True):
        assert (a.double() / 1e6 - b).norm() <= 8 * torch.finfo(dtype).eps * b.norm()


@each_backend
@each_loss
def test_a_coefficient_of_0_changes_no_bit(loss: str, backend: str) -> None:
    x = batch(loss)
    spec = LossSpec(teacher_loss=loss)
    reported, d_reported = evaluate(fused_linear_gac_loss, x, spec=spec, backend=backend)
    none = {"teacher_logps": None, "teacher_ids": None}
    plain, d_plain = evaluate(fused_linear_gac_loss, x, spec=spec, backend=backend, **none)
    assert plain.teacher_loss is None
    for name in ("loss", "rollout_loss", "demo_loss", "logps", "entropy"):
        assert torch.equal(getattr(reported, name), getattr(plain, name))
    for a, b in zip(d_reported, d_plain, strict=True):
        assert torch.equal(a, b)
    taught, _ = evaluate(fused_linear_gac_loss, x, backend=backend)
    torch.testing.assert_close(reported.teacher_loss, taught.teacher_loss)
    assert not reported.teacher_loss.requires_grad


@each_loss
@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("mu", [0.4, 1.0])
def test_work(loss: str, advantage: float, mu: float) -> None:
    """6 N H V FLOPs, also where only the teacher has a gradient; 2 N H V without a gradient."""
    x = batch(loss)
    live = int((x["inputs"][0] != -100).sum())
    targets, advantages, is_demo = x["inputs"]
    x["inputs"] = targets, advantages * advantage, is_demo
    for grad, factor in ((True, 6), (False, 2)):
        with WorkCounter() as work, torch.set_grad_enabled(grad):
            fused_linear_gac_loss(*x["leaves"], *x["inputs"], **x["keywords"] | {"mu": mu})
        assert work.flops == factor * live * H * V


@each_loss
def test_does_not_depend_on_mu(loss: str) -> None:
    x = batch(loss)
    half, _ = evaluate(fused_linear_gac_loss, x, mu=0.5)
    out, (d_hidden, _) = evaluate(fused_linear_gac_loss, x, mu=1.0)
    assert torch.equal(out.teacher_loss, half.teacher_loss)
    torch.testing.assert_close(out.loss, out.demo_loss + 0.7 * out.teacher_loss)
    assert (d_hidden[0, 1] != 0).any()


@each_loss
def test_packed_rows_equal_padded_ones(loss: str) -> None:
    x = batch(loss)
    padded, d_padded = evaluate(fused_linear_gac_loss, x)
    hidden, weight = x["leaves"]
    targets, advantages, is_demo = x["inputs"]
    x["leaves"] = [hidden.detach().flatten(0, 1).requires_grad_(), weight]
    x["inputs"] = targets.flatten(), advantages, is_demo
    names = [n for n in ("teacher_logps", "teacher_ids") if n in x["keywords"]]
    x["keywords"] |= {n: x["keywords"][n].flatten(0, 1) for n in names}
    packed, d_packed = evaluate(fused_linear_gac_loss, x, cu_seqlens=torch.arange(B + 1) * T)
    assert torch.equal(packed.loss, padded.loss)
    for a, b in zip(d_packed, d_padded, strict=True):
        assert torch.equal(a.view_as(b), b)


@pytest.mark.parametrize("loss", ["k1", "k2", "k3"])
def test_sampled_tokens_in_every_form(loss: str) -> None:
    x = doubled(batch(loss))
    hidden, weight = x["leaves"]
    linear, expected = evaluate(fused_linear_gac_loss, x)
    from_logits = fused_gac_loss(hidden @ weight.T, *x["inputs"], **x["keywords"])
    logps, _ = reference.linear_token_logprobs(hidden, weight, x["inputs"][0])
    from_logps = loss_from_logprobs(logps, *x["inputs"], **x["keywords"])
    for out in (from_logits, from_logps):
        torch.testing.assert_close(out.teacher_loss, linear.teacher_loss)
        grads = torch.autograd.grad(3 * out.loss, x["leaves"], retain_graph=True)
        torch.testing.assert_close(list(grads), expected)


@each_loss
def test_without_rollouts_or_tokens(loss: str) -> None:
    x = batch(loss)
    targets, advantages, is_demo = x["inputs"]
    x["inputs"] = targets, advantages, torch.ones_like(is_demo)
    out, _ = evaluate(fused_linear_gac_loss, x)
    assert out.teacher_loss == 0
    assert torch.equal(out.loss, 0.4 * out.demo_loss)
    x["inputs"] = torch.full_like(targets, -100), advantages, is_demo
    out, grads = evaluate(fused_linear_gac_loss, x)
    assert out.loss == out.teacher_loss == 0
    assert all((g == 0).all() for g in grads)
    x["leaves"][0] = torch.randn(0, T, H, requires_grad=True)
    x["inputs"] = targets[:0], advantages[:0], is_demo[:0]
    x["keywords"] |= {k: v[:0] for k, v in x["keywords"].items() if k.startswith("teacher")}
    out, _ = evaluate(fused_linear_gac_loss, x)
    assert out.loss == out.teacher_loss == 0


@each_loss
def test_rows_without_a_loss_in_a_cuda_graph(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured, no count can be read, and every row is computed."""
    x = doubled(batch(loss))
    expected, d_expected = evaluate(fused_linear_gac_loss, x)
    monkeypatch.setattr("gac_kernels.tokens.capturing", lambda device: True)
    with torch.no_grad():
        x["leaves"][0][0, 4] = math.nan  # a row without a loss
    out, grads = evaluate(fused_linear_gac_loss, x)
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(grads, d_expected)


@pytest.mark.parametrize("loss", TOP_K_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_rest(loss: str, dtype: torch.dtype) -> None:
    """All of a teacher's, or a student's, mass is in the K tokens; rounding gives a sum above 1."""
    hidden = torch.tensor([[[1.0]], [[60.0]]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [0.5], [0.0], [-1.0]], dtype=dtype)
    spec = LossSpec(teacher_coef=1.0, teacher_loss=loss)
    for sizes in ([0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.7, 0.2, 0.0999, 0.0001]):
        logps = (torch.tensor(sizes, dtype=dtype) + 1e-30).log() + 1e-7
        teacher = {"teacher_logps": logps.expand(2, 1, 4), "teacher_ids": torch.arange(4)}
        for count in (1, 2, 4):
            cut = {k: v.expand(2, 1, 4)[..., :count] for k, v in teacher.items()}
            out = fused_linear_gac_loss(
                hidden, weight, torch.zeros(2, 1).long(), torch.zeros(2), spec=spec, **cut
            )
            (grad,) = torch.autograd.grad(out.loss, hidden)
            assert out.loss.isfinite()
            assert out.teacher_loss > -1e-5
            assert grad.isfinite().all()


@each_backend
@pytest.mark.parametrize("loss", TOP_K_LOSSES)
def test_the_rest_is_masked(loss: str, backend: str) -> None:
    """Biases of -inf leave the student no token but those of the teacher, at one position none."""
    x = batch(loss)
    ids = x["keywords"]["teacher_ids"]
    ids[...] = torch.arange(K)
    ids[1] = torch.arange(K, 2 * K)
    bias = torch.where(torch.arange(V) < K, 0, -torch.inf)
    targets, advantages, is_demo = x["inputs"]
    x["inputs"] = targets.clamp(max=K - 1), advantages, is_demo
    if loss == "forward_kl":
        x["keywords"]["teacher_ids"][1] = ids[0]  # a token that only the student masks has no bound
    truth, d_truth = evaluate(reference.fused_linear_gac_loss, doubled(x), bias=bias.double())
    fused, d_fused = evaluate(fused_linear_gac_loss, x, bias=bias, backend=backend)
    assert truth.loss.isfinite()
    torch.testing.assert_close(fused.loss.double(), truth.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close([g.double() for g in d_fused], d_truth, rtol=1e-4, atol=1e-6)


def test_nan_of_the_teacher_is_visible() -> None:
    for loss in LOSSES:
        x = batch(loss)
        x["keywords"]["teacher_logps"][0, 2] = math.nan
        out, _ = evaluate(fused_linear_gac_loss, x)
        assert out.loss.isnan()
        assert out.teacher_loss.isnan()
        assert out.rollout_loss.isfinite()


def test_inference_mode() -> None:
    x = batch("reverse_kl")
    expected, _ = evaluate(fused_linear_gac_loss, x)
    with torch.inference_mode():
        out = fused_linear_gac_loss(*x["leaves"], *x["inputs"], **x["keywords"])
    assert torch.equal(out.loss, expected.loss)


@pytest.mark.parametrize("loss", ["k2", "forward_kl"])
def test_compiled(loss: str) -> None:
    x = batch(loss)

    def call() -> Any:
        return fused_linear_gac_loss(*x["leaves"], *x["inputs"], **x["keywords"])

    expected, d_expected = evaluate(fused_linear_gac_loss, x)
    out = torch.compile(call, backend="aot_eager", fullgraph=True)()
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(out.teacher_loss, expected.teacher_loss)
    grads = torch.autograd.grad(3 * out.loss, x["leaves"])
    torch.testing.assert_close(list(grads), d_expected)


def test_the_mean_gradients_of_the_sampled_losses() -> None:
    """Summed over all tokens by their probability: none, and those of the two divergences."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(V, generator=g, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(V, generator=g, dtype=torch.float64).log_softmax(-1)
    q, p = logits.log_softmax(-1), teacher
    wanted = {
        "k1": 0 * q.sum(),
        "k2": (q.exp() * (q - p)).sum(),
        "k3": (p.exp() * (p - q)).sum(),
    }
    for loss, divergence in wanted.items():
        out = fused_gac_loss(
            logits.expand(V, 1, V),
            torch.arange(V)[:, None],
            torch.zeros(V),
            teacher_logps=teacher[:, None],
            weights=None,
            spec=LossSpec(teacher_coef=1.0, teacher_loss=loss, rollout_reduction="token"),
            rollout_norm=1.0,
        )
        per_token = torch.autograd.grad(out.loss, logits, retain_graph=True)[0]
        # weigh each sampled token's gradient by its probability
        rows = logits.detach().expand(V, V).clone().requires_grad_()
        out = fused_gac_loss(
            rows[:, None],
            torch.arange(V)[:, None],
            torch.zeros(V),
            teacher_logps=teacher[:, None],
            spec=LossSpec(teacher_coef=1.0, teacher_loss=loss, rollout_reduction="token"),
            rollout_norm=1.0,
        )
        (grad,) = torch.autograd.grad(out.loss, rows)
        torch.testing.assert_close(grad.sum(0), per_token)
        (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
        torch.testing.assert_close(q.detach().exp() @ grad, expected)


TOP = torch.zeros(B, T, K).long()
ERRORS = {
    "teacher_logps is None: spec.teacher_coef=0.7 requires it": {"teacher_logps": None},
    "teacher_logps is None: teacher_ids": {"teacher_logps": None, "teacher_ids": TOP},
    "teacher_ids is None: spec.teacher_loss='reverse_kl'": {
        "spec": LossSpec(teacher_loss="reverse_kl")
    },
    "teacher_ids is given but spec.teacher_loss='k2'": {"teacher_ids": TOP},
    "teacher_logps has shape [4, 4]: expected [4, 5]": {"teacher_logps": torch.zeros(B, 4)},
    "teacher_logps[0, 0] = 2.0: use log-probabilities <= 0": {
        "teacher_logps": torch.full((B, T), 2.0)
    },
}
TOP_ERRORS = {
    "teacher_ids has shape [4, 5]: expected [4, 5, K]": {"teacher_ids": TOP[..., 0]},
    "teacher_ids has shape [4, 5, 0]": {"teacher_ids": TOP[..., :0]},
    "teacher_logps has shape [4, 5, 3]: expected [4, 5, 6]": {
        "teacher_logps": torch.zeros(B, T, 3)
    },
    "teacher_ids[0, 0, 0] = 37: use a token in [0, 37)": {"teacher_ids": TOP + V},
}
CASES = [("k2", *item) for item in ERRORS.items()]
CASES += [("reverse_kl", *item) for item in TOP_ERRORS.items()]


@pytest.mark.parametrize(("loss", "message", "change"), CASES, ids=[c[1] for c in CASES])
def test_errors_name_the_argument(loss: str, message: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error:
        evaluate(fused_linear_gac_loss, batch(loss), **change)
    assert str(error.value).startswith(message)


def test_a_teacher_without_rollouts_by_argument() -> None:
    x = batch("k2")
    with pytest.raises(ValueError, match="advantages is None: .* a teacher teaches rollouts"):
        fused_linear_gac_loss(
            *x["leaves"], x["inputs"][0], teacher_logps=x["keywords"]["teacher_logps"]
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher_loss": "kl"}, "teacher_loss='kl': use one of k1"),
        ({"teacher_coef": math.nan}, "teacher_coef=nan: use a finite number"),
        ({"correction": "probability_mask", "correction_max": 1.5}, "correction_max=1.5"),
        ({"correction": "probability_mask", "correction_max": None}, "correction_max=None"),
        ({"correction": "probability_mask", "correction_min": 0.1}, "correction_min=0.1"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        LossSpec(**options)
    assert str(error.value).startswith(message)
