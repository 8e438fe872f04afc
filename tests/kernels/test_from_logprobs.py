"""`loss_from_logprobs` against the fused loss on logits: outputs, gradients, errors."""

import pytest
import torch
from torch import Tensor

import gac_kernels
from gac_kernels import DemoWeight, LossSpec, loss_from_logprobs, reference
from tests.kernels.cases import (
    BY_NAME,
    Batch,
    Case,
    build,
    check,
    check_outputs,
    each_case,
    require_backend,
)

SCALING = {"softcap", "logit_scale"}  # of the logits, so that log-probs have it already


def from_logits(batch: Batch):
    """Return `loss_from_logprobs` of the reference's log-probs, and the gradient of the logits."""
    logits = batch.logits()
    scaling = {name: batch.keywords[name] for name in SCALING & batch.keywords.keys()}
    scaling["temperature"] = batch.keywords["spec"].temperature
    logps, entropy = reference.token_logprobs(logits, batch.targets, **scaling)
    out = call(batch, logps, entropy)
    return out, torch.autograd.grad(out.loss, logits)[0]


def fused(batch: Batch, backend: str):
    """Return `fused_gac_loss` and the gradient of the logits; the reference uses autograd."""
    logits = batch.logits()
    exact = backend == "reference"
    function, options = (reference, {}) if exact else (gac_kernels, {"backend": backend})
    out = function.fused_gac_loss(logits, *batch.inputs, **batch.keywords, **options)
    return out, torch.autograd.grad(out.loss, logits)[0]


@each_case
def test_float64_equals_the_reference_bit_for_bit(case: Case) -> None:
    batch = build(case, torch.float64)
    (ours, d_ours), (exact, d_exact) = from_logits(batch), fused(batch, "reference")
    for name in ("loss", "rollout_loss", "demo_loss", "kl", "clip_fraction", "logps", "entropy"):
        a, b = getattr(ours, name), getattr(exact, name)
        assert a.dtype == torch.float64, name
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)), name
    for name in ("rollouts", "demo_nll", "totals"):
        a, b = (getattr(x.moments, name).nan_to_num(-1) for x in (ours, exact))
        assert torch.equal(a, b), name
    assert torch.equal(d_ours, d_exact)


@each_case
def test_float32_is_as_accurate_as_the_fused_kernels(case: Case) -> None:
    batch = build(case)
    truth, d_truth = fused(batch.to(torch.float64), "reference")
    kernel, d_kernel = fused(batch, require_backend("native"))
    ours, d_ours = from_logits(batch)
    same_dtype, d_same_dtype = fused(batch, "reference")
    check_outputs(ours, same_dtype, truth)
    check_outputs(kernel, same_dtype, truth)
    check("gradient", d_ours, d_same_dtype, d_truth)
    check("gradient of the kernel", d_kernel, d_same_dtype, d_truth)


def leaves(name: str, dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor, Tensor]:
    """Build a batch and the leaf tensors logps and entropy."""
    batch = build(BY_NAME[name], dtype)
    stats = reference.token_logprobs(batch.logits().detach(), batch.targets)
    logps, entropy = (x.requires_grad_() for x in stats)
    return batch, logps, entropy


def call(batch: Batch, logps: Tensor, entropy: Tensor | None = None, **changes):
    keywords = {k: x for k, x in batch.keywords.items() if k not in SCALING} | changes
    return loss_from_logprobs(logps, *batch.inputs, entropy=entropy, **keywords)


def test_differentiable_twice_in_logps_and_entropy() -> None:
    """With w = 1 and explicit old log-probabilities, nothing is detached."""
    batch, logps, entropy = leaves("clip")
    spec = LossSpec(demo_weight=DemoWeight.ONE, entropy_coef=0.1)
    assert torch.autograd.gradcheck(lambda *x: call(batch, *x, spec=spec).loss, (logps, entropy))
    out = call(batch, logps, entropy, spec=spec)
    assert all(not x.requires_grad for x in out[1:7])
    assert out.loss.requires_grad
    first = torch.autograd.grad(out.loss, logps, create_graph=True)[0]
    assert torch.autograd.grad(first.sum(), logps)[0].isfinite().all()


def test_only_logps_and_entropy_are_differentiated() -> None:
    """All other inputs are constants, even if they require a gradient."""
    batch, logps, entropy = leaves("k3")
    spec = LossSpec(kl_coef=0.1, correction="token_truncate")
    columns = {
        name: (logps.detach() + shift).requires_grad_()
        for name, shift in (("old_logps", 0.1), ("ref_logps", 0.2), ("rollout_logps", -0.1))
    }
    weights = torch.rand_like(batch.advantages).requires_grad_()
    constants = *columns.values(), weights, batch.advantages.requires_grad_()
    out = call(batch, logps, entropy, spec=spec, weights=weights, **columns)
    out.loss.backward()
    assert logps.grad.any()
    assert not any(x.grad is not None for x in constants)
    assert not any(x.requires_grad for x in (*out[1:7], *vars(out.moments).values()))


def test_masked_tokens_are_not_read() -> None:
    batch, logps, entropy = leaves("packed")
    masked = batch.targets == -100
    clean = call(batch, logps, entropy)
    grads = torch.autograd.grad(clean.loss, logps)[0]
    assert masked.any()
    assert not grads[masked].any()
    assert grads[~masked].any()
    dirty = logps.detach().masked_fill(masked, torch.nan).requires_grad_()
    out = call(batch, dirty, entropy.detach().masked_fill(masked, torch.inf))
    assert torch.equal(out.loss, clean.loss)
    assert torch.equal(out.logps, clean.logps)
    assert torch.equal(torch.autograd.grad(out.loss, dirty)[0], grads)


def test_without_entropy_only_entropy_outputs_are_nan_and_moments_are_optional() -> None:
    batch, logps, entropy = leaves("k3")
    expected, out = call(batch, logps, entropy), call(batch, logps)
    live = batch.targets != -100
    assert out.entropy[live].isnan().all()
    assert not out.entropy[~live].any()
    assert torch.equal(out.loss, expected.loss)
    assert out.moments.totals[4:].isnan().all()
    assert torch.equal(out.moments.totals[:4], expected.moments.totals[:4])
    assert out.moments.signals() == expected.moments.signals()
    assert call(batch, logps, moments=False).moments is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    batch, logps, _ = leaves("clip", torch.float32)
    half = logps.detach().to(dtype).requires_grad_()
    wide = half.detach().float().requires_grad_()
    ours, exact = call(batch, half), call(batch, wide)
    assert ours.loss.dtype == torch.float32
    assert torch.equal(ours.loss, exact.loss)
    grads = torch.autograd.grad(ours.loss, half) + torch.autograd.grad(exact.loss, wide)
    assert grads[0].dtype == dtype
    assert torch.equal(grads[0], grads[1].to(dtype))


def test_compiles_without_graph_breaks() -> None:
    batch, logps, entropy = leaves("entropy", torch.float32)
    mu = torch.tensor(0.4)

    def loss(x: Tensor, h: Tensor) -> Tensor:
        return call(batch, x, h, mu=mu).loss

    torch.testing.assert_close(
        torch.compile(loss, backend="eager", fullgraph=True)(logps, entropy), loss(logps, entropy)
    )


ERRORS = {
    "logps is a list: use a tensor": {"logps": [0.0]},
    "logps has dtype torch.int64: use a float dtype": {"logps": torch.zeros(2, 3).long()},
    r"logps has shape \[2, 4\]: expected \[2, 3\]": {"logps": torch.zeros(2, 4)},
    "logps is on meta: move it to cpu": {"logps": torch.zeros(2, 3, device="meta")},
    r"entropy has shape \[3\]: expected \[2, 3\]": {"entropy": torch.zeros(3)},
    "targets has dtype torch.int32: use int64": {"targets": torch.zeros(2, 3).int()},
    r"targets has shape \(1, 2, 3\): use \[B, T\] or packed \[N\]": {
        "targets": torch.zeros(1, 2, 3).long()
    },
    r"targets\[0, 0\] = -1: use a token in \[0, V\), or -100": {"targets": torch.full((2, 3), -1)},
    "entropy is None: spec.entropy_coef=0.1": {"spec": LossSpec(entropy_coef=0.1)},
    "ref_logps is None: spec.kl_coef=0.1": {"spec": LossSpec(kl_coef=0.1)},
    "mu=1.5": {"mu": 1.5},
    "cu_seqlens is None: .*packed": {
        "targets": torch.zeros(3).long(),
        "logps": torch.zeros(3),
    },
    r"cu_seqlens=\[0, 1, 2\]: use offsets that .* end at N = 3": {
        "targets": torch.zeros(3).long(),
        "logps": torch.zeros(3),
        "cu_seqlens": torch.tensor([0, 1, 2]),
    },
    r"is_demo has shape \[3\]: expected \[2\]": {"is_demo": torch.zeros(3).bool()},
}


@pytest.mark.parametrize(("message", "wrong"), ERRORS.items(), ids=ERRORS)
def test_errors_name_the_argument(message: str, wrong: dict) -> None:
    valid = {
        "logps": -torch.ones(2, 3),
        "targets": torch.zeros(2, 3, dtype=torch.int64),
        "advantages": torch.ones(2),
        "is_demo": torch.tensor([False, True]),
    }
    with pytest.raises((TypeError, ValueError), match=message):
        loss_from_logprobs(**{"mu": 0.5} | valid | wrong)
