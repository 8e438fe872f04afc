"""The CUDA cluster kernels on a GPU: real vocabularies, splits, addresses, streams and graphs.

Tests that need no GPU are in test_cuda_source.py; here the same source runs with the real
instructions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.smoke import unavailable_reason
from gac_kernels import DemoWeight, LossSpec, fused_gac_loss, reference
from gac_kernels.backends import cuda
from gac_kernels.inputs import BatchInputs
from gac_kernels.sketch import HeadSketch, RowSketch, row_buckets
from gac_kernels.tokens import plan
from tests.kernels.triton_cases import DEVICE, FIELDS, error, evaluate, make_batch, scale_of

pytestmark = pytest.mark.gpu
ALL_OPTIONS = LossSpec(kl_coef=0.1, entropy_coef=0.01, dual_clip=1.5, temperature=0.9)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build the library on first use; on unsupported GPUs, skip with the reason."""
    if reason := cuda.unavailable(torch.device("cuda"), torch.float32):
        pytest.skip(f"native backend: {reason}")
    # in a subprocess first, because it could hang or crash this one
    if reason := unavailable_reason("native", "cuda"):
        pytest.fail(f"native backend: {reason}")


def check(batch: dict[str, Any], **keywords: Any) -> None:
    """Assert that the errors of values and gradients are at most twice those of the same-dtype
    reference.
    """
    out, grad = evaluate(batch, backend="native", **keywords)
    truth, true_grad = evaluate(batch, torch.float64, backend="reference", **keywords)
    plain, plain_grad = evaluate(batch, backend="reference", **keywords)
    pairs = [(n, getattr(out, n), getattr(plain, n), getattr(truth, n)) for n in FIELDS]
    for name, value, baseline, exact in [*pairs, ("gradient", grad, plain_grad, true_grad)]:
        bound = 2 * error(baseline, exact) + 2e-6 * scale_of(exact)
        assert error(value, exact) <= bound, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [152064, 151936, 128256, 32000, 50257, 11])
def test_real_vocabularies(vocab: int, dtype: torch.dtype, poison: None) -> None:
    """With 50257 logits per row, every other row is unaligned."""
    check(make_batch(rows=6, width=5, vocab=vocab, dtype=dtype, peak=12.0), spec=ALL_OPTIONS)


@pytest.mark.parametrize("weight", DemoWeight)
def test_demonstration_weights(weight: DemoWeight) -> None:
    check(make_batch(vocab=3000), spec=LossSpec(demo_weight=weight))


@pytest.mark.parametrize("split", [(1, 28), (2, 28), (4, 14), (8, 7), (8, 9), (8, 28)])
def test_row_splits(split: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One to eight blocks, with a full ring buffer and with free slots."""
    monkeypatch.setattr(cuda, "split", lambda *_, **__: cuda.Split(*split))
    check(make_batch(rows=40, width=9, vocab=100_000, dtype=torch.bfloat16), spec=ALL_OPTIONS)


def test_more_rows_than_clusters_is_deterministic() -> None:
    batch = make_batch(rows=256, width=16, vocab=32000, dtype=torch.bfloat16, peak=12.0)
    results = [evaluate(batch, backend="native") for _ in range(3)]
    for other in results[1:]:
        assert torch.equal(results[0][1], other[1])
        assert torch.equal(results[0][0].logps, other[0].logps)
        assert torch.equal(results[0][0].loss, other[0].loss)
    triton, _ = evaluate(batch, backend="triton")
    assert error(results[0][0].logps, triton.logps) < 2e-5


@pytest.mark.parametrize(("vocab", "size"), [(152064, 16), (50257, 64), (32000, 4)])
def test_sketch_of_the_float32_gradient(vocab: int, size: int) -> None:
    """The sketch is that of the float32 gradient, even if a narrower gradient overwrites the
    logits.
    """
    logits = torch.randn(2, 64, vocab, device=DEVICE)
    targets = torch.randint(vocab, (2, 64), device=DEVICE)
    is_demo = torch.tensor([False, True], device=DEVICE)
    advantages = torch.tensor([0.7, 1.0], device=DEVICE)
    tokens = plan(BatchInputs(targets, advantages, is_demo, 0.4), ALL_OPTIONS)
    gradient = torch.empty_like(logits)
    cuda.row_loss(logits, tokens, ALL_OPTIONS, gradient)
    signs = HeadSketch(size).signs(vocab, logits.device).to(torch.int8)
    rows = [RowSketch(signs, logits.new_zeros(128, size)) for _ in range(3)]
    truth = RowSketch(signs, logits.new_zeros(128, size, dtype=torch.float64))
    row_buckets(gradient, truth)
    cuda.row_loss(logits, tokens, ALL_OPTIONS, gradient.clone(), rows[0])
    narrow = torch.empty(logits.shape, dtype=torch.bfloat16, device=DEVICE)
    cuda.row_loss(logits, tokens, ALL_OPTIONS, narrow, rows[1])
    in_place = logits.view(torch.bfloat16)[..., :vocab]
    cuda.row_loss(logits, tokens, ALL_OPTIONS, in_place, rows[2])
    assert torch.equal(in_place, narrow) and torch.equal(rows[1].buckets, rows[2].buckets)
    atol = 1e-6 * gradient.abs().max().item()
    for row in rows:
        torch.testing.assert_close(row.buckets.double(), truth.buckets, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("vocab", [152064, 50257])
def test_in_place_gradient_is_the_same(vocab: int) -> None:
    """Neighboring rows of 50257 logits share 16-byte words and are written concurrently."""
    batch = make_batch(rows=32, width=16, vocab=vocab, dtype=torch.bfloat16)
    _, separate = evaluate(batch, backend="native")
    copy = dict(batch, logits=batch["logits"].clone())
    _, in_place = evaluate(copy, backend="native", overwrite=True)
    assert torch.equal(separate, in_place)


def test_concurrent_work_does_not_change_the_result() -> None:
    """Another stream occupies multiprocessors, so that some clusters start late."""
    batch = make_batch(rows=64, width=32, vocab=32000, dtype=torch.bfloat16)
    _, idle = evaluate(batch, backend="native")
    side, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(8):
            torch.mm(matrix, matrix)
    _, concurrent = evaluate(batch, backend="native")
    torch.cuda.synchronize()
    assert torch.equal(idle, concurrent)


def test_more_than_two_to_the_31_logits() -> None:
    """The last rows are beyond the range of 32-bit indices."""
    vocab = 151936
    rows = 2**31 // vocab + 8
    logits = torch.empty(1, rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    for part in logits.split(1024, dim=1):
        part.normal_()
    targets = torch.randint(vocab, (rows,), device=DEVICE)
    logps, entropy, _ = cuda.row_stats(logits, targets, 1.0)
    exact = reference.token_logprobs(logits[0, -8:].double(), targets[-8:])
    assert error(logps[-8:], exact[0]) < 2e-5 and error(entropy[-8:], exact[1]) < 2e-5


def test_masked_rows_are_never_read() -> None:
    batch = make_batch(rows=6, width=7, vocab=9001)
    batch["targets"][:, 3] = -100
    out, grad = evaluate(batch, backend="native")
    batch["logits"][:, 3] = torch.nan
    out_again, grad_again = evaluate(batch, backend="native")
    assert torch.equal(out.loss, out_again.loss) and torch.equal(grad, grad_again)


def test_the_whole_loss_can_be_captured_in_a_cuda_graph() -> None:
    batch = make_batch(rows=4, width=8, vocab=32000, dtype=torch.bfloat16)
    batch["mu"] = torch.tensor(0.3, device=DEVICE)
    logits = batch.pop("logits")

    def step() -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        out = fused_gac_loss(leaf, backend="native", **batch)
        return out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # queries the number of clusters once, before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    replayed = [x.clone() for x in captured]
    for value, exact in zip(replayed, step(), strict=True):
        assert torch.equal(value, exact)


def test_scaling() -> None:
    """Scale by 1 and by 0.5; odd lengths and unaligned views."""
    for tensor in (torch.randn(1001, device=DEVICE), torch.randn(1002, device=DEVICE)[1:]):
        before = tensor.clone()
        cuda.scale_(tensor, torch.tensor(1.0, device=DEVICE))
        assert torch.equal(tensor, before)
        cuda.scale_(tensor, torch.tensor(0.5, device=DEVICE))
        assert torch.equal(tensor, before * 0.5)
