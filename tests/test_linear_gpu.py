"""The linear form on a GPU: half-precision GEMMs with float32 output, chunks, masked rows, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.smoke import problem
from gac_kernels import LossSpec, fused_linear_gac_loss, reference

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SPEC = LossSpec(kl_coef=0.1, entropy_coef=0.01)


def make(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Four sequences, the second and fourth demonstrations; a masked tail."""
    weight = torch.randn(vocab, hidden, device=DEVICE) / hidden**0.5
    targets = torch.randint(vocab, (4, tokens // 4), device=DEVICE)
    states = 2 * torch.randn(*targets.shape, hidden, device=DEVICE)
    states += 10 * torch.rand(*targets.shape, 1, device=DEVICE) * weight[targets]
    targets[2, -3:] = -100
    return {
        "hidden": states.to(dtype),
        "weight": weight.to(dtype),
        "targets": targets,
        "advantages": torch.tensor([1.0, 0.0, -0.7, 0.0], device=DEVICE),
        "is_demo": torch.tensor([False, True, False, True], device=DEVICE),
        "old_logps": torch.full(targets.shape, -2.0, device=DEVICE),
        "ref_logps": torch.full(targets.shape, -2.2, device=DEVICE),
    }


def run(call, batch: dict[str, Tensor], dtype: torch.dtype | None = None, **keywords):
    leaves = [batch[n].to(dtype or batch[n].dtype).requires_grad_() for n in ("hidden", "weight")]
    rest = {n: x for n, x in batch.items() if n not in ("hidden", "weight")}
    out = call(*leaves, **rest, spec=SPEC, **keywords)
    return out, torch.autograd.grad(out.loss, leaves)


def relative(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("backend", ["triton", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_gradients(backend: str, dtype: torch.dtype) -> None:
    """With one chunk and with many; gradient errors are no larger than PyTorch's in the same dtype."""
    if reason := problem(
        backend, "cuda"
    ):  # checked in a subprocess first: a hanging kernel would take this process down
        pytest.skip(reason)
    batch = make(480, 256, 50257, dtype)
    truth, true_grads = run(reference.fused_linear_gac_loss, batch, torch.float64)

    def plain(hidden: Tensor, weight: Tensor, *_: Tensor, **keywords):
        logits = torch.nn.functional.linear(hidden, weight)
        return reference.fused_gac_loss(logits, **keywords)

    _, plain_grads = run(plain, batch)
    for chunk_bytes in (None, 128 * 50257 * 4):
        out, grads = run(fused_linear_gac_loss, batch, backend=backend, chunk_bytes=chunk_bytes)
        assert (out.logps - truth.logps).abs().max() < 2e-4
        assert (out.entropy - truth.entropy).abs().max() < 2e-4
        assert relative(out.loss, truth.loss) < 1e-4
        for ours, theirs, exact in zip(grads, plain_grads, true_grads, strict=True):
            assert relative(ours, exact) <= 1.05 * relative(theirs, exact) + 1e-6


def test_extra_memory_is_bounded() -> None:
    """At most 1 GiB beyond inputs and gradients, including the float32 accumulator of the weight
    gradient.
    """
    batch = make(8192, 1024, 151936, torch.bfloat16)
    run(fused_linear_gac_loss, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = run(fused_linear_gac_loss, batch)[1]
    peak = torch.cuda.max_memory_allocated() - before
    summed = 4 * batch["weight"].numel() + sum(g.nbytes for g in grads)
    assert peak - summed <= 2**30, f"{(peak - summed) / 2**20:.0f} MiB"


def test_a_lone_sum_is_rounded_once() -> None:
    """With a single chunk, the weight gradient is written directly in bfloat16 without losing
    accuracy.
    """
    batch = make(1024, 512, 50257, torch.bfloat16)
    _, alone = run(fused_linear_gac_loss, batch)
    _, parts = run(fused_linear_gac_loss, batch, chunk_bytes=(128 * 4 + 256 * 2) * 50257)
    _, truth = run(reference.fused_linear_gac_loss, batch, torch.float64)
    assert relative(alone[1], truth[1]) <= 1.05 * relative(parts[1], truth[1])


def test_records_in_a_cuda_graph() -> None:
    """With several chunks of several blocks, and the small inputs in pinned CPU memory."""
    batch = make(2048, 512, 50257, torch.bfloat16)
    batch["hidden"].requires_grad_()
    for name in ("advantages", "is_demo"):
        batch[name] = batch[name].cpu().pin_memory()
    rest = {n: x for n, x in batch.items() if n not in ("hidden", "weight")}

    def step() -> tuple[Tensor, Tensor]:
        out = fused_linear_gac_loss(
            batch["hidden"], batch["weight"], **rest, spec=SPEC, chunk_bytes=512 * 50257 * 4
        )
        return out.logps, torch.autograd.grad(out.loss, batch["hidden"])[0]

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    graph.replay()
    torch.cuda.synchronize()
    logps, grad = step()
    torch.testing.assert_close(recorded[0], logps, rtol=0, atol=2e-4)
    assert relative(recorded[1], grad.double()) < 1e-2
