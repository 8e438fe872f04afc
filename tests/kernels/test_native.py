"""Numerics and memory of the native CPU backend: dtypes, strides, extreme logits, threads."""

import dataclasses
import functools
import math

import pytest
import torch

from gac_kernels import fused_gac_loss, reference, token_logprobs
from gac_kernels.backends import cpu
from gac_kernels.tokens import Scaling
from tests.kernels.cases import BY_NAME, HALF, build, error, loss_and_grad, require_backend
from tests.kernels.test_linear_memory import PeakMemory

require_backend("native")


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_rounds_only_input_and_gradient(dtype: torch.dtype) -> None:
    batch = build(BY_NAME["all options"], dtype)
    logits = batch.logits()
    truth, (true_grad,) = loss_and_grad(
        reference.fused_gac_loss, logits.detach().double().requires_grad_(), batch
    )
    ours, (grad,) = loss_and_grad(fused_gac_loss, logits, batch, backend="native")
    assert grad.dtype == dtype
    for name in ("loss", "kl", "logps", "entropy"):
        value = getattr(truth, name)
        assert error(getattr(ours, name), value) < 2e-6 * (1 + value.abs().max()), name
    rounding = true_grad.float().to(dtype).double() - true_grad
    excess_error = (grad.double() - true_grad).abs() - rounding.abs()
    step = torch.finfo(dtype).eps * true_grad.abs() + torch.finfo(dtype).tiny
    assert (excess_error <= 0.01 * step + 1e-8).all(), "the gradient was rounded more than once"


@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("name", ("wide", "masked-tiles"))
def test_overwrite_allocates_no_second_buffer(dtype: torch.dtype, name: str) -> None:
    batch = build(BY_NAME[name], dtype)
    logits = batch.logits()
    rows = logits * 1  # a leaf that is overwritten could not be used again
    expected, (grad,) = loss_and_grad(fused_gac_loss, logits, batch, backend="native")

    with PeakMemory() as memory:
        call = functools.partial(fused_gac_loss, backend="native", overwrite=True)
        ours, (ours_grad,) = loss_and_grad(call, rows, batch)
    assert torch.equal(ours_grad, grad)
    assert torch.equal(ours.loss, expected.loss)
    assert ours_grad.data_ptr() == rows.data_ptr()
    assert 0 < memory.peak < rows.nbytes / 20


@pytest.mark.parametrize("distance", (0.0, -80.0))
def test_any_temperature_gives_the_nearest_float32(distance: float) -> None:
    """1 / temperature in base 2 is rounded to float32, and the error is corrected."""
    logits, target = torch.full((1, 1, 3001), -1e5), torch.tensor([7])
    logits[0, 0, 5:9] = distance
    logits[0, 0, 5] = 0
    for temperature in torch.linspace(0.5, 3, 50).tolist():
        logps, *_ = cpu.row_stats(logits, target, Scaling(temperature))
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
    batch = build(dataclasses.replace(BY_NAME["all options"], vocabulary=4099, lengths=(20,) * 6))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(loss_and_grad(fused_gac_loss, batch.logits(), batch, backend="native"))
    finally:
        torch.set_num_threads(before)
    (first, grad), *others = results
    for ours, ours_grad in others:
        assert torch.equal(*ours_grad, *grad)
        assert all(map(torch.equal, ours[:7], first[:7]))
