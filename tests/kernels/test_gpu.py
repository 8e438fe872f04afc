"""Both backends' row kernels on a GPU: real vocabularies, splits, addresses, streams, graphs.

Tests that need no GPU are in test_triton.py and test_cuda_source.py; here the same source runs with
the real instructions.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.smoke import unavailable_reason
from gac_kernels import DemoWeight, LossSpec, backends, fused_gac_loss, reference
from gac_kernels.backends import cuda
from gac_kernels.tokens import Scaling, Upstream

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FIELDS = ("loss", "rollout_loss", "demo_loss", "kl", "clip_fraction", "logps", "entropy")


def make_batch(
    rows: int = 3,
    width: int = 2,
    vocab: int = 301,
    dtype: torch.dtype = torch.float32,
    peak: float = 4.0,
) -> dict[str, Any]:
    """A demonstration between two rollouts, with peaked logits as in a trained model and one masked
    token.
    """
    logits = torch.randn(rows, width, vocab) * 2
    targets = torch.randint(vocab, (rows, width))
    logits.scatter_add_(2, targets[..., None], torch.full((rows, width, 1), peak))
    logps = (logits.to(dtype).float().log_softmax(-1)).gather(2, targets[..., None])[..., 0]
    targets[0, -1] = -100
    batch = {
        "logits": logits.to(dtype),
        "targets": targets,
        "advantages": torch.linspace(-1, 1.5, rows),
        "is_demo": torch.arange(rows) % 3 == 1,
        "old_logps": logps + 0.3 * torch.randn(rows, width),
        "ref_logps": logps + 0.3 * torch.randn(rows, width),
        "mu": 0.3,
    }
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in batch.items()}


def evaluate(batch: dict[str, Any], dtype: torch.dtype | None = None, **keywords: Any) -> Any:
    """Return the outputs and the gradient; `dtype` converts the logits, exactly if it is wider."""
    batch = {"mu": 0.5, **batch, **keywords}
    logits = batch.pop("logits").detach()
    logits = logits if dtype is None else logits.to(dtype)
    logits.requires_grad_()
    out = fused_gac_loss(logits, backend=batch.pop("backend"), **batch)
    out.loss.backward()
    return out, logits.grad


def error(value: Tensor, truth: Tensor) -> float:
    """The largest absolute error; infinite if exactly one of the two values is NaN."""
    value, truth = value.double().cpu(), truth.double().cpu()
    equal = (value == truth) | (value.isnan() & truth.isnan())
    return torch.where(equal, 0, (value - truth).abs()).nan_to_num(math.inf).max().item()


def scale_of(truth: Tensor) -> float:
    return max(1.0, truth.double().nan_to_num(0, 0, 0).abs().max().item())


FLOOR = {"triton": 1e-6, "native": 2e-6}  # relative to the largest value


def check(batch: dict[str, Any], backend: str = "triton", **keywords: Any) -> None:
    """Assert that the errors of values and gradients against float64 are at most twice those of the
    same-dtype reference.
    """
    out, grad = evaluate(batch, backend=backend, **keywords)
    truth, true_grad = evaluate(batch, torch.float64, backend="reference", **keywords)
    plain, plain_grad = evaluate(batch, backend="reference", **keywords)
    assert grad.dtype == batch["logits"].dtype
    pairs = [(n, getattr(out, n), getattr(plain, n), getattr(truth, n)) for n in FIELDS]
    pairs.append(("gradient", grad, plain_grad, true_grad))
    if out.moments is not None:
        names = ("rollouts", "demo_nll", "totals")
        pairs += [(n, *(getattr(x.moments, n) for x in (out, plain, truth))) for n in names]
    for name, value, baseline, exact in pairs:
        bound = 2 * error(baseline, exact) + FLOOR[backend] * scale_of(exact)
        assert error(value, exact) <= bound, name


ALL_OPTIONS = LossSpec(kl_coef=0.1, entropy_coef=0.01, dual_clip=1.5, temperature=0.9)
HALF = {"vocab": 32000, "dtype": torch.bfloat16}


@pytest.fixture(params=["triton", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    """Skip a backend that cannot run here, with the reason."""
    if reason := backends.unavailable(request.param, torch.device("cuda"), torch.float32):
        pytest.skip(f"{request.param}: {reason}")
    # in a subprocess first, because it could hang or crash this one
    if reason := unavailable_reason(request.param, "cuda"):
        pytest.fail(f"{request.param}: {reason}")
    return request.param


native = pytest.mark.parametrize("backend", ["native"], indirect=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [152064, 151936, 128256, 32000, 50257, 11])
def test_real_vocabularies(backend: str, vocab: int, dtype: torch.dtype, poison: None) -> None:
    """With 50257 logits per row, every other row is unaligned."""
    batch = make_batch(rows=6, width=5, vocab=vocab, dtype=dtype, peak=12.0)
    check(batch, backend, spec=ALL_OPTIONS)


@pytest.mark.parametrize("weight", DemoWeight)
def test_demonstration_weights(backend: str, weight: DemoWeight) -> None:
    check(make_batch(vocab=3000), backend, spec=LossSpec(demo_weight=weight))


def test_large_logits_lose_no_precision(backend: str) -> None:
    """A shift by 1000 changes only the rounding of the inputs. This holds only on a GPU, because
    the interpreter does not fuse multiply-adds.
    """
    batch = make_batch(vocab=32000, dtype=torch.float16)
    batch["logits"] += 1000
    check(batch, backend)


@native
@pytest.mark.parametrize("split", [(1, 28), (2, 28), (4, 14), (8, 7), (8, 9), (8, 28)])
def test_row_splits(backend: str, split: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One to eight blocks, with a full ring buffer and with free slots."""
    monkeypatch.setattr(cuda, "split", lambda *_, **__: cuda.Split(*split))
    batch = make_batch(rows=40, width=9, vocab=100_000, dtype=torch.bfloat16)
    check(batch, backend, spec=ALL_OPTIONS)


def test_results_are_bitwise_reproducible(backend: str) -> None:
    """More rows than run at once, alone and beside other work, which delays some of them."""
    batch = make_batch(rows=256, width=16, **HALF, peak=12.0)
    first, grad = evaluate(batch, backend=backend)
    side, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE)
    for busy in (False, True, True):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(8 * busy):
                torch.mm(matrix, matrix)
        out, other_grad = evaluate(batch, backend=backend)
        torch.cuda.synchronize()
        assert torch.equal(grad, other_grad)
        for name in FIELDS:
            torch.testing.assert_close(
                getattr(out, name), getattr(first, name), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("vocab", [152064, 50257])
def test_in_place_gradient_is_the_same(backend: str, vocab: int) -> None:
    """The targets are in the last tile, which Triton overwrites first; neighboring rows of 50257
    logits share 16-byte words and are written concurrently.
    """
    batch = make_batch(rows=32, width=16, vocab=vocab, dtype=torch.bfloat16)
    batch["targets"] = torch.randint(vocab - vocab % 4096, vocab, (32, 16), device=DEVICE)
    out, separate = evaluate(batch, backend=backend)
    for _ in range(20):
        out_again, in_place = evaluate(
            dict(batch, logits=batch["logits"].clone()), backend=backend, overwrite=True
        )
        assert torch.equal(separate, in_place)
        assert torch.equal(out.logps, out_again.logps)


def test_more_than_two_to_the_31_logits(backend: str) -> None:
    """The last rows are beyond 32-bit addressing; they are compared with a small batch that
    contains only them.
    """
    vocab = 151936
    rows = 2**31 // vocab + 8
    logits = torch.empty(1, rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    for part in logits.split(1024, dim=1):
        part.normal_()
    targets = torch.randint(vocab, (1, rows), device=DEVICE)
    last, ones = logits[:, -8:].clone(), torch.ones(1, device=DEVICE)
    logits.requires_grad_()
    out = fused_gac_loss(logits, targets, ones, backend=backend)
    out.loss.backward()
    exact = last.double().requires_grad_()
    expected = reference.fused_gac_loss(exact, targets[:, -8:], ones, rollout_norm=rows / 8)
    expected.loss.backward()
    tolerance = {"triton": 2e-4, "native": 2e-5}[backend]
    assert error(out.logps[:, -8:], expected.logps) < tolerance
    assert error(out.entropy[:, -8:], expected.entropy) < tolerance
    assert error(logits.grad[:, -8:], exact.grad) <= 2**-8 * exact.grad.abs().max().item()
    assert logits.grad[:, :1].any()
    assert logits.grad[:, rows // 2].any()


def test_more_rows_than_the_grid_y_limit(backend: str) -> None:
    targets = torch.randint(64, (70_000,), device=DEVICE)
    logits = torch.randn(1, 70_000, 64, device=DEVICE)
    rows = backends.load(backend, logits.device)
    logps, entropy, _ = rows.row_stats(logits, targets, Scaling(1.0))
    exact = reference.token_logprobs(logits[0].double(), targets)
    assert error(logps, exact[0]) < 2e-6
    assert error(entropy, exact[1]) < 2e-6


def test_masked_rows_are_never_read(backend: str) -> None:
    batch = make_batch(rows=6, width=7, vocab=9001)
    batch["targets"][:, 3] = -100
    out, grad = evaluate(batch, backend=backend)
    batch["logits"][:, 3] = torch.nan
    out_again, grad_again = evaluate(batch, backend=backend)
    assert torch.equal(out.loss, out_again.loss)
    assert torch.equal(grad, grad_again)


def replayed(logits: Tensor, step: Callable[[], tuple[Tensor, ...]]) -> None:
    """Capture `step` in a graph; a replay on new logits must give the results for those logits."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()  # compiles, and queries the number of clusters, before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    for value, exact in zip([x.clone() for x in captured], step(), strict=True):
        assert torch.equal(value, exact)


def test_row_kernels_can_be_captured_in_a_cuda_graph(backend: str) -> None:
    """No kernel synchronizes with the host."""
    batch = make_batch(rows=4, width=8, **HALF)
    logits, targets = batch["logits"], batch["targets"].flatten()
    rows, out = backends.load(backend, logits.device), torch.empty_like(logits)
    ones, factor = torch.ones(32, device=DEVICE), torch.tensor(0.5, device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        logps, entropy, lse = rows.row_stats(logits, targets, Scaling(1.0))
        upstream = Upstream(lse, entropy, ones, 0 * ones)
        rows.row_grads(logits, targets, Scaling(1.0), upstream, out)
        rows.scale_(out, factor)
        return logps, entropy, out

    replayed(logits, step)


def test_the_whole_loss_can_be_captured_in_a_cuda_graph(backend: str) -> None:
    batch = make_batch(rows=4, width=8, **HALF)
    batch["mu"] = torch.tensor(0.3, device=DEVICE)
    logits = batch.pop("logits")

    def step() -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        out = fused_gac_loss(leaf, backend=backend, **batch)
        return out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]

    replayed(logits, step)


def test_tensors_on_a_non_current_device(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits = torch.randn(1, 4, 1000, device="cuda:1")
    targets = torch.randint(1000, (4,), device="cuda:1")
    logps, _, _ = backends.load(backend, logits.device).row_stats(logits, targets, Scaling(1.0))
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
        evaluate(
            make_batch(rows=rows, width=width, vocab=512),
            backend="triton",
            spec=LossSpec(temperature=temperature),
        )
    assert before >= 1
    assert compiled() == before


def test_scaling(backend: str) -> None:
    """Scale by 1 and by 0.5; odd lengths and unaligned views."""
    scale_ = backends.load(backend, torch.device("cuda")).scale_
    for tensor in (torch.randn(1001, device=DEVICE), torch.randn(1002, device=DEVICE)[1:]):
        before = tensor.clone()
        scale_(tensor, torch.tensor(1.0, device=DEVICE))
        assert torch.equal(tensor, before)
        scale_(tensor, torch.tensor(0.5, device=DEVICE))
        assert torch.equal(tensor, before * 0.5)
