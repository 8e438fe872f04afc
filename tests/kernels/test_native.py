"""Numerics and memory of the native CPU backend: dtypes, strides, extreme logits, threads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gac_kernels import (
    DemoWeight,
    LossSpec,
    backends,
    reference,
    token_logprobs,
)
from gac_kernels.backends import cpu
from gac_kernels.contract import POLICIES
from gac_kernels.inputs import BatchInputs
from gac_kernels.tokens import Tokens
from tests.kernels.native_cases import CPU, HALF, SPECS, batch, call, error


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_float32_is_as_accurate_as_pytorch(spec: LossSpec) -> None:
    data = batch(1003, temperature=spec.temperature)
    doubles = {k: v.double() if v.is_floating_point() else v for k, v in data.items()}
    truth, true_grad = call(doubles, backend="reference", spec=spec)
    baseline, baseline_grad = call(data, backend="reference", spec=spec)
    ours, grad = call(data, spec=spec)
    for name, value in truth.items():
        margin = 2e-7 * (1 + value.abs().max())
        assert error(ours[name], value) <= error(baseline[name], value) + margin, name
    assert error(grad, true_grad) <= error(baseline_grad, true_grad) + 1e-8
    assert true_grad.abs().max() > 1e-3, "the bound above would also hold for zero gradients"


WIDTHS = {
    "one": 1,
    "under a vector": 11,
    "odd": 257,
    "several vectors and a remainder": 1003,
    "one more than a block": 2049,
    "several blocks and a remainder": 32000,
    "wide and odd": 50257,
}


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_any_width(width: int) -> None:
    data = batch(width, rows=2, length=3)
    truth, true_grad = call(data | {"logits": data["logits"].double()}, backend="reference")
    ours, grad = call(data)
    for name in ("logps", "entropy"):  # half a ulp plus a small margin
        assert error(ours[name], truth[name]) <= 6e-8 * truth[name].abs().max() + 1.5e-7, name
    assert error(grad, true_grad) <= 1e-6 * true_grad.abs().max()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_rounds_only_input_and_gradient(dtype: torch.dtype) -> None:
    spec = SPECS["everything"]
    data = batch(1003, temperature=spec.temperature)
    logits = data["logits"].to(dtype)
    truth, true_grad = call(data, logits.double(), backend="reference", spec=spec)
    ours, grad = call(data, logits, spec=spec)
    assert grad.dtype == dtype
    for name, value in truth.items():
        assert error(ours[name], value) < 2e-6 * (1 + value.abs().max()), name
    rounding = true_grad.float().to(dtype).double() - true_grad
    excess_error = (grad.double() - true_grad).abs() - rounding.abs()
    step = torch.finfo(dtype).eps * true_grad.abs() + torch.finfo(dtype).tiny
    assert (excess_error <= 0.01 * step + 1e-8).all(), "the gradient was rounded more than once"


@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("spec", (SPECS["plain"], SPECS["everything"]), ids=("plain", "entropy"))
def test_overwrite_allocates_no_second_buffer(dtype: torch.dtype, spec: LossSpec) -> None:
    data = batch(5003)
    logits = data["logits"].to(dtype)
    expected, grad = call(data, logits, spec=spec)
    owned, sizes = logits.clone(), []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            new = [x for x in tensors if x.data_ptr() != owned.data_ptr()]
            sizes.extend(x.untyped_storage().nbytes() for x in new)
            return out

    with Allocations():
        ours, ours_grad = call(data, owned, spec=spec, overwrite=True)
    assert torch.equal(ours_grad, grad) and torch.equal(ours["loss"], expected["loss"])
    assert ours_grad.data_ptr() == owned.data_ptr()
    assert sizes and max(sizes) < owned.nbytes / 20


def test_a_token_without_scale_has_a_zero_gradient_even_if_its_logits_are_nan() -> None:
    data = batch(300)
    logits = data.pop("logits")
    spec = LossSpec(demo_weight=DemoWeight.ONE)
    tokens = cpu.plan(BatchInputs(**data), spec)
    tokens.scale[5] = 0  # a demonstration
    logits.view(20, -1)[5, 7] = math.nan
    out = torch.empty_like(logits)
    terms = cpu.row_loss(logits, tokens, spec, out)
    assert terms.logps[5].isnan() and (out.view(20, -1)[5] == 0).all()


def test_the_first_largest_logit_is_the_top1_also_of_a_row_of_minima() -> None:
    logits = torch.full((1, 3, 40), torch.finfo(torch.float32).min)
    logits[0, 2, 30:] = 1
    targets = torch.tensor([0, 1, 30])
    *_, is_top1 = cpu.row_stats(logits, targets, 1.0, more_outputs=True)
    assert is_top1.tolist() == [1, 0, 1]


@pytest.mark.parametrize("spec", (SPECS["plain"], SPECS["everything"]), ids=("plain", "entropy"))
def test_minus_infinity_logits_mask_the_vocabulary(spec: LossSpec) -> None:
    data = batch(5000, rows=2, length=2)
    unmasked = torch.zeros(5000, dtype=torch.bool)
    unmasked[2500:4000] = True  # every entry of the first block is masked
    data["targets"].clamp_(min=0).remainder_(1500).add_(2500)
    masked = data["logits"].masked_fill(~unmasked, -math.inf)
    ours, grad = call(data, masked, spec=spec)
    small = data | {"targets": data["targets"] - 2500}
    expected, small_grad = call(small, data["logits"][..., unmasked].contiguous(), spec=spec)
    assert (grad[..., ~unmasked] == 0).all()
    assert error(grad[..., unmasked], small_grad) <= 1e-6 * small_grad.abs().max()
    assert error(ours["entropy"], expected["entropy"]) < 1e-6


@pytest.mark.parametrize(
    "bad", (math.nan, -math.nan, math.inf), ids=("nan", "negative nan", "infinity")
)
@pytest.mark.parametrize("place", (0, 2047, 4999), ids=("first", "end of block", "rest"))
def test_nonfinite_logit_makes_its_row_nan(bad: float, place: int) -> None:
    data = batch(5000, rows=2, length=2)
    data["targets"].fill_(17)
    data["logits"][0, 1, place] = bad
    ours, grad = call(data)
    assert ours["loss"].isnan() and ours["logps"][0, 1].isnan() and ours["entropy"][0, 1].isnan()
    assert grad[0, 1].isnan().all() and grad[0, 0].isfinite().all()


def test_nan_with_any_payload_is_propagated() -> None:
    data = batch(300, rows=2, length=2)
    data["targets"].fill_(3)
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x003FFEAB, -0x00400000], dtype=torch.int32)
    for payload in bits:
        data["logits"].view(torch.int32)[0, 1, 200] = payload
        logps, entropy = token_logprobs(data["logits"], data["targets"], backend="native")
        assert logps[0, 1].isnan() and entropy[0, 1].isnan() and logps[0, 0].isfinite()


def test_target_outside_the_vocabulary_is_not_read() -> None:
    targets = torch.tensor([8, -1, 2])
    logps, *_, is_top1 = cpu.row_stats(torch.zeros(1, 3, 8), targets, 1.0, more_outputs=True)
    assert logps[:2].isnan().all() and logps[2] == pytest.approx(-math.log(8))
    assert not is_top1.any()  # although the values next to the row are equal to its maximum


def test_offset_peaked_and_monotonic_rows() -> None:
    ramp = torch.linspace(-300, 300, 9000)
    rows = {
        "large offset": torch.randn(9000) + 1000,
        "peaked": torch.where(torch.arange(9000) == 4000, 60.0, torch.randn(9000)),
        "every block has a new maximum": ramp,
        "the maximum is in the first block": ramp.flip(0),
        "finfo.min as a mask": torch.where(torch.arange(9000) < 5000, -3.4e38, torch.randn(9000)),
    }
    for name, row in rows.items():
        target = torch.tensor([[8000]])
        logps, entropy = token_logprobs(row[None, None], target, backend="native")
        baseline = reference.token_logprobs(row[None, None], target)
        truth = reference.token_logprobs(row.double()[None, None], target)
        assert error(logps, truth[0]) <= error(baseline[0], truth[0]) + 2e-7, name
        assert error(entropy, truth[1]) <= error(baseline[1], truth[1]) + 2e-7, name


@pytest.mark.parametrize("distance", (0.0, -80.0))
def test_any_temperature_gives_the_nearest_float32(distance: float) -> None:
    """1 / temperature in base 2 is rounded to float32, and the error is corrected."""
    logits, target = torch.full((1, 1, 3001), -1e5), torch.tensor([7])
    logits[0, 0, 5:9] = distance
    logits[0, 0, 5] = 0
    for temperature in torch.linspace(0.5, 3, 50).tolist():
        logps, *_ = cpu.row_stats(logits, target, temperature)
        truth = (logits.double() / temperature).log_softmax(-1)[0, 0, 7]
        assert error(logps, truth) <= 2**-24 * 2 ** math.ceil(math.log2(-truth)) * 1.01


def test_small_probabilities_keep_relative_accuracy() -> None:
    """Probabilities from 1 to 1e-35.

    Errors come from rounding the distance to the largest logit, its product with log2(e), log2(e)
    itself, and a power of two in [1, 2).
    """
    leaf = (7 - torch.linspace(0, 80, 5001))[None, None].requires_grad_()
    logps, _ = token_logprobs(leaf, torch.tensor([[0]]), backend="native")
    logps.backward(torch.tensor([[-1.0]]))
    logits = leaf.detach()[0, 0].double()
    exact = logits.softmax(-1)[1:]  # the gradient of every vocabulary entry except the target
    relative = (leaf.grad[0, 0, 1:].double() / exact - 1).abs()
    assert (relative <= 3e-7 + (2 * 2**-24 + 1.4e-8) * (7 - logits[1:])).all()


def test_results_are_bitwise_equal_for_any_thread_count() -> None:
    data = batch(4099, rows=6, length=20)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(call(data, spec=SPECS["everything"]))
    finally:
        torch.set_num_threads(before)
    (first, grad), *others = results
    for ours, ours_grad in others:
        assert torch.equal(ours_grad, grad)
        assert all(torch.equal(ours[k], first[k]) for k in first)


def test_a_masked_target_has_no_gradient_under_a_softcap() -> None:
    logits = torch.tensor([[[-torch.inf, 0.5, 1.0, -1.0]]])
    one, out = torch.ones(1), torch.empty_like(logits)
    cpu.row_grads(logits, torch.tensor([0]), one, one, one, one, 1.0, out, softcap=3.0)
    assert out[0, 0, 0] == 0 and (out[0, 0, 1:] != 0).all()


@pytest.mark.parametrize("dual_clip", (None, 1.5))
@pytest.mark.parametrize("use_bias_correction_kl", (False, True))
@pytest.mark.parametrize("policy", POLICIES)
def test_ratios_far_from_1(
    policy: str, use_bias_correction_kl: bool, dual_clip: float | None
) -> None:
    """Above exp(MAX_LOG_RATIO), the ratio is clamped, and its gradient is 0."""
    spec = LossSpec(
        policy_loss=policy,
        kl_coef=0.1,
        use_bias_correction_kl=use_bias_correction_kl,
        dual_clip=dual_clip,
    )
    data = batch(31, rows=8, length=3)
    logits, shape = data.pop("logits"), data["targets"].shape
    log_ratios = torch.tensor([60, 41, 39, 3, -3, -39, -41, -60.0])[:, None]
    data |= {
        "is_demo": torch.zeros(8).bool(),
        "advantages": torch.tensor([1, 0, -1.0]).expand(shape),
    }
    data["old_logps"] = reference.token_logprobs(logits, data["targets"])[0] - log_ratios
    tokens = cpu.plan(BatchInputs(**data), spec)
    out, exact = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.float64)
    terms = cpu.row_loss(logits, tokens, spec, out)
    wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in tokens]
    truth = backends.load("reference", CPU).row_loss(logits.double(), Tokens(*wide), spec, exact)
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert error(out / scale, exact / scale) < 1e-4  # rounding of the log-probabilities
    for name, ours, theirs in zip(terms._fields, terms, truth, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-5, atol=1e-6, msg=name)
