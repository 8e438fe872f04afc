"""The Triton kernels at real sizes on a GPU: vocabularies, 64-bit addresses, streams and CUDA
graphs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gac_kernels import LossSpec, fused_gac_loss, reference
from gac_kernels.backends import triton as backend
from tests.kernels.triton_cases import DEVICE, FIELDS, check, error, evaluate, make_batch

pytestmark = pytest.mark.gpu


def test_large_logits_lose_no_precision() -> None:
    """A shift by 1000 changes only the rounding of the inputs. This holds only on a GPU, because
    the interpreter does not fuse multiply-adds.
    """
    batch = make_batch(vocab=32000, dtype=torch.float16)
    batch["logits"] += 1000
    check(batch)


@pytest.mark.parametrize("vocab", [151936, 152064, 128256, 32000])
def test_real_vocabularies(vocab: int, poison: None) -> None:
    batch = make_batch(rows=6, width=5, vocab=vocab, dtype=torch.bfloat16, peak=14.0)
    check(batch, spec=LossSpec(kl_coef=0.1, entropy_coef=0.01))


def test_more_than_two_to_the_31_logits() -> None:
    """The last rows are beyond 32-bit addressing; they are compared with a small batch that
    contains only them.
    """
    vocab = 151936
    rows = 2**31 // vocab + 8
    logits = torch.empty(1, rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    for part in logits.split(1024, dim=1):
        part.normal_()
    targets = torch.randint(vocab, (1, rows), device=DEVICE)
    last = logits[:, -8:].clone()
    is_demo = torch.zeros(1, dtype=torch.bool, device=DEVICE)
    advantages = torch.ones(1, device=DEVICE)
    logits.requires_grad_()
    out = fused_gac_loss(logits, targets, advantages, is_demo, mu=0.0, backend="triton")
    out.loss.backward()
    exact = last.double().requires_grad_()
    expected = reference.fused_gac_loss(
        exact, targets[:, -8:], advantages, is_demo, mu=0.0, rollout_norm=rows / 8
    )
    expected.loss.backward()
    assert error(out.logps[:, -8:], expected.logps) < 2e-4
    assert error(out.entropy[:, -8:], expected.entropy) < 2e-4
    grad = logits.grad[:, -8:]
    assert error(grad, exact.grad) <= 2**-8 * exact.grad.abs().max().item()
    assert logits.grad[:, :1].any() and logits.grad[:, rows // 2].any()


def test_more_rows_than_the_grid_y_limit() -> None:
    targets = torch.randint(64, (70_000,), device=DEVICE)
    logits = torch.randn(1, 70_000, 64, device=DEVICE)
    logps, entropy, _ = backend.row_stats(logits, targets, 1.0)
    exact = reference.token_logprobs(logits[0].double(), targets)
    assert error(logps, exact[0]) < 2e-6 and error(entropy, exact[1]) < 2e-6


def test_large_results_are_bitwise_reproducible() -> None:
    batch = make_batch(rows=64, width=16, vocab=152064, dtype=torch.bfloat16, peak=14.0)
    first, second = (evaluate(batch, backend="triton") for _ in range(2))
    for name in FIELDS:
        equal = torch.equal(getattr(first[0], name), getattr(second[0], name))
        assert equal or (name == "kl" and first[0].kl.isnan()), name
    assert torch.equal(first[1], second[1])


def test_in_place_gradient_matches() -> None:
    """The targets are in the last, partial tile, which is overwritten first; the kernel must read
    them before that.
    """
    batch = make_batch(rows=32, width=16, vocab=152064, dtype=torch.bfloat16)
    batch["targets"] = torch.randint(147456, 152064, (32, 16), device=DEVICE)
    out, separate = evaluate(batch, backend="triton")
    for _ in range(20):
        copy = dict(batch, logits=batch["logits"].clone())
        out_again, in_place = evaluate(copy, backend="triton", overwrite=True)
        assert torch.equal(separate, in_place) and torch.equal(out.logps, out_again.logps)


def test_row_kernels_can_be_captured_in_a_cuda_graph() -> None:
    """No kernel synchronizes with the host, so a replay on new logits gives the results for those
    logits.
    """
    batch = make_batch(rows=4, width=8, vocab=32000, dtype=torch.bfloat16)
    logits, targets = batch["logits"], batch["targets"].flatten()
    ones, zeros = torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE)
    out = torch.empty_like(logits)
    factor = torch.tensor(0.5, device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        logps, entropy, lse = backend.row_stats(logits, targets, 1.0)
        backend.row_grads(logits, targets, lse, entropy, ones, zeros, 1.0, out)
        backend.scale_(out, factor)
        return logps, entropy

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compile first: compilation is not allowed during capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    replayed = [x.clone() for x in (*captured, out)]
    for value, exact in zip(replayed, (*step(), out), strict=True):
        assert torch.equal(value, exact)


def test_loss_can_be_captured_in_a_cuda_graph() -> None:
    batch = make_batch(rows=4, width=8, vocab=32000, dtype=torch.bfloat16)
    batch["mu"] = torch.tensor(0.3, device=DEVICE)
    logits = batch.pop("logits")

    def step() -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        out = fused_gac_loss(leaf, backend="triton", **batch)
        return out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    replayed = [x.clone() for x in captured]
    for value, exact in zip(replayed, step(), strict=True):
        assert torch.equal(value, exact)


def test_tensors_on_a_non_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits = torch.randn(1, 4, 1000, device="cuda:1")
    targets = torch.randint(1000, (4,), device="cuda:1")
    logps, _, _ = backend.row_stats(logits, targets, 1.0)
    exact, _ = reference.token_logprobs(logits[0].double(), targets)
    assert error(logps, exact) < 2e-6


def test_new_batch_sizes_compile_nothing() -> None:
    """Rows, row length and temperature are run-time values: only the first call compiles."""
    from gac_kernels.backends.triton.loss import loss_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in loss_kernel.device_caches.values())

    evaluate(make_batch(rows=3, width=2, vocab=512), backend="triton")
    before = compiled()
    for rows, width, temperature in ((1, 1, 1.0), (16, 16, 0.7), (5, 7, 1.3)):
        batch = make_batch(rows=rows, width=width, vocab=512)
        evaluate(batch, backend="triton", spec=LossSpec(temperature=temperature))
    assert before >= 1 and compiled() == before
