"""The chunked LM head on a GPU: half-precision GEMMs with float32 output, chunks and memory."""

import pytest
import torch
from torch import Tensor

from bench.smoke import unavailable_reason
from gac_kernels import LossSpec, fused_linear_gac_loss, projection, reference

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SPEC = LossSpec(kl_coef=0.1, entropy_coef=0.01)


def make(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Build two rollouts and two demonstrations, alternating; the third has masked tokens.

    The old policy and the reference are close to the current one.
    """
    weight = torch.randn(vocab, hidden, device=DEVICE) / hidden**0.5
    targets = torch.randint(vocab, (4, tokens // 4), device=DEVICE)
    states = 2 * torch.randn(*targets.shape, hidden, device=DEVICE)
    states += 10 * torch.rand(*targets.shape, 1, device=DEVICE) * weight[targets]
    logps = reference.linear_token_logprobs(states, weight, targets)[0]
    targets[2, -3:] = -100
    return {
        "hidden": states.to(dtype),
        "weight": weight.to(dtype),
        "targets": targets,
        "advantages": torch.tensor([1.0, 0.0, -0.7, 0.0], device=DEVICE),
        "is_demo": torch.tensor([False, True, False, True], device=DEVICE),
        "mu": torch.tensor(0.4, device=DEVICE),
        "old_logps": logps + 0.3 * torch.randn_like(logps),
        "ref_logps": logps + 0.5 * torch.randn_like(logps),
    }


def run(call, batch: dict[str, Tensor], dtype: torch.dtype | None = None, **keywords):
    leaves = [batch[n].to(dtype or batch[n].dtype).requires_grad_() for n in ("hidden", "weight")]
    rest = {n: x for n, x in batch.items() if n not in ("hidden", "weight")}
    out = call(*leaves, **rest, spec=SPEC, **keywords)
    return out, torch.autograd.grad(out.loss, leaves)


def relative(x: Tensor, truth: Tensor) -> float:
    """Norm of the error divided by the norm of the truth."""
    return ((x.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("backend", ["triton", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_gradients(backend: str, dtype: torch.dtype) -> None:
    """For one chunk and several, gradient errors are at most PyTorch's in the same dtype."""
    # checked in a subprocess first, because a hanging kernel would block this process
    if reason := unavailable_reason(backend, "cuda"):
        pytest.skip(reason)
    batch = make(480, 256, 50257, dtype)
    truth, true_grads = run(reference.fused_linear_gac_loss, batch, torch.float64)

    def pytorch(hidden: Tensor, weight: Tensor, *_: Tensor, **keywords):
        return reference.fused_gac_loss(torch.nn.functional.linear(hidden, weight), **keywords)

    _, pytorch_grads = run(pytorch, batch)
    for chunk_bytes in (None, 128 * 50257 * 4):
        out, grads = run(fused_linear_gac_loss, batch, backend=backend, chunk_bytes=chunk_bytes)
        assert (out.logps - truth.logps).abs().max() < 2e-4
        assert (out.entropy - truth.entropy).abs().max() < 2e-4
        assert relative(out.loss, truth.loss) < 1e-4
        for ours, theirs, exact in zip(grads, pytorch_grads, true_grads, strict=True):
            assert relative(ours, exact) <= 1.05 * relative(theirs, exact) + 1e-6


def test_extra_memory_is_bounded() -> None:
    """At most the budget and 3% beyond the inputs, the gradients and the float32 sum of weight
    gradients.
    """
    batch = make(8192, 1024, 151936, torch.bfloat16)
    run(fused_linear_gac_loss, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = run(fused_linear_gac_loss, batch)[1]
    peak = torch.cuda.max_memory_allocated() - before
    extra = peak - 4 * batch["weight"].numel() - sum(g.nbytes for g in grads)
    budget = projection.default_budget("cuda")
    assert extra <= 1.03 * budget, f"{extra / 2**20:.0f} MiB"


def test_a_single_chunk_gradient_is_rounded_once() -> None:
    """A single chunk writes the weight gradient directly in bfloat16, as accurately as a sum."""
    batch = make(1024, 512, 50257, torch.bfloat16)
    _, single = run(fused_linear_gac_loss, batch)
    _, chunked = run(fused_linear_gac_loss, batch, chunk_bytes=(128 * 4 + 256 * 2) * 50257)
    _, truth = run(reference.fused_linear_gac_loss, batch, torch.float64)
    assert relative(single[1], truth[1]) <= 1.05 * relative(chunked[1], truth[1])


def test_cuda_graph_capture() -> None:
    """Several chunks of several blocks, with the small inputs in pinned CPU memory."""
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

    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        step()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    logps, grad = step()
    torch.testing.assert_close(captured[0], logps, rtol=0, atol=2e-4)
    assert relative(captured[1], grad.double()) < 1e-2
