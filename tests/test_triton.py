"""The Triton kernels against the definition in float64, interpreted on the CPU or on a GPU."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from gac_kernels import DemoWeight, LossSpec, fused_gac_loss, reference, token_logprobs
from gac_kernels.backends import triton as backend
from gac_kernels.backends import triton_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        backend.unavailable(torch.device(DEVICE), torch.float32) is not None,
        reason="Triton can run here neither on a GPU nor interpreted",
    ),
    # Arithmetic on inf and nan, which some cases are about, warns in the interpreter's numpy.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
FIELDS = ("loss", "rollout_loss", "demo_loss", "kl", "clip_fraction", "logps", "entropy")
PER_TOKEN = ("logits", "targets", "old_logps", "ref_logps")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred words meet several tiles, as real vocabularies do."""
    tile = triton_launch.Tiling(lanes=32, width=4, warps=1, stages=3)
    monkeypatch.setattr(triton_launch, "tiling", lambda vocab, dtype: tile)


def make_batch(
    rows: int = 3,
    width: int = 2,
    vocab: int = 301,
    dtype: torch.dtype = torch.float32,
    peak: float = 4.0,
) -> dict[str, Any]:
    """Two rollouts around a demonstration, peaked as a trained model is, one token masked."""
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
    """The outputs and the gradient; `dtype` converts the logits (exactly, when upward)."""
    batch = dict(batch, **keywords)
    logits = batch.pop("logits").detach()
    logits = logits if dtype is None else logits.to(dtype)
    logits.requires_grad_()
    out = fused_gac_loss(logits, backend=batch.pop("backend"), **batch)
    out.loss.backward()
    return out, logits.grad


def error(value: Tensor, truth: Tensor) -> float:
    """The largest absolute error; infinite where only one of the two is a number."""
    value, truth = value.double().cpu(), truth.double().cpu()
    alike = (value == truth) | (value.isnan() & truth.isnan())
    return torch.where(alike, 0, (value - truth).abs()).nan_to_num(math.inf).max().item()


def scale_of(truth: Tensor) -> float:
    return max(1.0, truth.double().nan_to_num(0, 0, 0).abs().max().item())


def check(batch: dict[str, Any], **keywords: Any) -> None:
    """Values and gradients are no further from float64 than twice the same-dtype reference."""
    out, grad = evaluate(batch, backend="triton", **keywords)
    truth, true_grad = evaluate(batch, torch.float64, backend="reference", **keywords)
    plain, plain_grad = evaluate(batch, backend="reference", **keywords)
    assert grad.dtype == batch["logits"].dtype
    pairs = [(n, getattr(out, n), getattr(plain, n), getattr(truth, n)) for n in FIELDS]
    pairs.append(("gradient", grad, plain_grad, true_grad))
    if out.moments is not None:
        names = ("rollouts", "demo_nll", "totals")
        pairs += [(n, *(getattr(x.moments, n) for x in (out, plain, truth))) for n in names]
    for name, value, baseline, exact in pairs:
        bound = 2 * error(baseline, exact) + 1e-6 * scale_of(exact)
        assert error(value, exact) <= bound, name


LOSSES = {
    "defaults": LossSpec(),
    "no clip: the bounds are infinite": LossSpec(clip_low=None, clip_high=None),
    "narrow clip: removes gradients": LossSpec(clip_low=0.01, clip_high=0.02),
    "dual clip: bounds a negative advantage": LossSpec(dual_clip=1.1, clip_high=None),
    "k1": LossSpec(kl_coef=0.2, kl_estimator="k1"),
    "k2": LossSpec(kl_coef=0.2, kl_estimator="k2"),
    "k3": LossSpec(kl_coef=0.2, kl_estimator="k3"),
    "entropy bonus: a second gradient term": LossSpec(entropy_coef=0.1),
    "cross-entropy weight": LossSpec(demo_weight=DemoWeight.ONE),
    "p weight": LossSpec(demo_weight=DemoWeight.P),
    "shaped: reads the demonstration's advantage": LossSpec(demo_weight=DemoWeight.SHAPED),
    "trust above and below c": LossSpec(demo_weight=DemoWeight.TRUST, demo_shape=0.3),
    "temperature": LossSpec(temperature=0.7, entropy_coef=0.1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_option_of_the_loss(name: str, small_tiles: None, poison: None) -> None:
    check(make_batch(), spec=LOSSES[name])


# One reason each: vocabularies that fill no tile, exactly one, one and a word, and a real tile.
@pytest.mark.parametrize("vocab", [11, 128, 129, 1])
def test_vocabulary_of_any_size(vocab: int, small_tiles: None, poison: None) -> None:
    check(make_batch(vocab=vocab), spec=LossSpec(entropy_coef=0.1))


def test_shipped_tile(poison: None) -> None:
    check(make_batch(vocab=1500))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(
    dtype: torch.dtype, small_tiles: None, poison: None
) -> None:
    check(make_batch(dtype=dtype), spec=LossSpec(kl_coef=0.1, entropy_coef=0.1))


def test_on_policy_ratio_is_one_and_keeps_its_gradient(small_tiles: None) -> None:
    batch = make_batch()
    del batch["old_logps"], batch["ref_logps"]
    check(batch)


def test_per_token_advantages(small_tiles: None) -> None:
    check(dict(make_batch(), advantages=torch.randn(3, 2, device=DEVICE)))


def test_packed_sequences_with_an_empty_one(small_tiles: None) -> None:
    batch = make_batch()
    for name in PER_TOKEN:
        batch[name] = batch[name].flatten(0, 1)
    batch["cu_seqlens"] = torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=DEVICE)
    check(batch, spec=LossSpec(kl_coef=0.1))


def test_rows_of_any_stride(small_tiles: None, poison: None) -> None:
    batch = make_batch()
    wide = torch.full((5, 4, 400), torch.nan, device=DEVICE)
    rows = wide[::2, 1::2, 7:308]
    rows.copy_(batch["logits"])
    check(dict(batch, logits=rows))


def test_overwrite_takes_the_storage_and_nothing_beside_it(small_tiles: None) -> None:
    batch = make_batch()
    _, expected = evaluate(batch, backend="triton")
    leaf = batch.pop("logits").requires_grad_()
    wide = torch.nn.functional.pad(leaf, (3, 2), value=7.0)
    rows = wide[..., 3:-2]
    fused_gac_loss(rows, backend="triton", overwrite=True, **batch).loss.backward()
    assert torch.equal(leaf.grad, expected)
    assert torch.equal(wide[..., 3:-2], expected)
    assert (wide[..., :3] == 7).all() and (wide[..., -2:] == 7).all()


def test_gradient_of_a_narrower_type_in_the_logits_own_rows(small_tiles: None) -> None:
    """The linear form keeps float32 logits and wants a bfloat16 gradient without a second chunk."""
    batch = make_batch()
    logits = batch["logits"].clone()
    targets = batch["targets"].flatten()
    out = logits.view(torch.bfloat16)[..., : logits.shape[-1]]
    _, entropy, lse = backend.row_stats(logits, targets, 0.8)
    d_logps, d_entropy = torch.randn(2, 6, device=DEVICE)
    arguments = (targets, lse, entropy, d_logps, d_entropy, 0.8)
    expected = torch.empty_like(out)
    backend.row_grads(logits, *arguments, expected)
    backend.row_grads(logits, *arguments, out)
    assert torch.equal(out, expected)


def test_batches_without_tokens_or_without_a_loss(small_tiles: None) -> None:
    batch = make_batch()
    batch["targets"] = torch.full_like(batch["targets"], -100)
    batch["logits"] = torch.full_like(batch["logits"], torch.nan)  # never read into the loss
    for case in (batch, {k: v[:, :0] if k in PER_TOKEN else v for k, v in batch.items()}):
        out, grad = evaluate(case, backend="triton")
        assert out.loss == 0 and not grad.any()


def test_one_token(small_tiles: None) -> None:
    check(make_batch(rows=1, width=2))


def test_no_gradient_is_written_where_none_is_due(small_tiles: None) -> None:
    """Advantage 0 without KL, and a term of weight 0: the gradient is zero, the statistics not."""
    batch = make_batch()
    batch["advantages"] = torch.zeros(3, device=DEVICE)
    out, grad = evaluate(batch, backend="triton", mu=0.0)
    assert not grad.any() and out.logps[0, 0] != 0 and out.entropy[1, 0] > 0


def test_masked_vocabulary(small_tiles: None) -> None:
    """Whole tiles of -inf before, between and after the numbers; the entropy's 0 log 0 is 0."""
    batch = make_batch()
    words = torch.arange(301, device=DEVICE)
    masked = (words < 140) | ((words >= 150) & (words < 290)) | (words == 300)
    batch["logits"] = batch["logits"].masked_fill(masked, -torch.inf)
    batch["targets"] = torch.where(batch["targets"] < 0, -100, 145)
    check(batch, spec=LossSpec(entropy_coef=0.1), ref_logps=None)


def test_a_row_of_nothing_but_masked_words_is_nan(small_tiles: None) -> None:
    batch = make_batch()
    batch["logits"][1, 0] = -torch.inf
    out, _ = evaluate(batch, backend="triton")
    assert out.loss.isnan() and out.logps[1, 0].isnan() and out.logps[1, 1].isfinite()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("word", [0, 200, 300], ids=["first", "middle", "tail"])
def test_bad_logits_make_a_nan_loss(value: float, word: int, small_tiles: None) -> None:
    batch = make_batch()
    batch["logits"][2, 1, word] = value
    out, _ = evaluate(batch, backend="triton")
    assert out.loss.isnan() and out.logps[2, 1].isnan()
    assert out.logps[2, 0].isfinite() and out.demo_loss.isfinite()


def test_bad_logits_of_a_row_without_loss_are_not_read(small_tiles: None) -> None:
    batch = make_batch()
    batch["logits"][0, 1] = torch.nan
    out, grad = evaluate(batch, backend="triton")
    assert out.loss.isfinite() and not grad[0, 1].any()


@pytest.mark.parametrize("target", [301, -1, 2**40])
def test_target_outside_the_vocabulary_reads_nothing_and_is_nan(
    target: int, small_tiles: None
) -> None:
    batch = make_batch()
    targets = batch["targets"].flatten()
    targets[2] = target
    logps, entropy, _ = backend.row_stats(batch["logits"], targets, 1.0)
    assert logps[2].isnan() and entropy.isfinite().all() and logps[3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_and_entropy_are_differentiable(
    dtype: torch.dtype, small_tiles: None, poison: None
) -> None:
    batch = make_batch(dtype=dtype)
    weights = torch.randn(2, 3, 2, device=DEVICE)
    weights[:, 1, 0] = 0  # a row that no gradient reaches

    def run(logits: Tensor, name: str) -> tuple[Tensor, ...]:
        logits = logits.detach().requires_grad_()
        targets = batch["targets"]
        if name == "triton":
            results = token_logprobs(logits, targets, temperature=0.8, backend=name)
        else:
            results = reference.token_logprobs(logits, targets, temperature=0.8)
        sum((w * r).sum() for w, r in zip(weights, results, strict=True)).backward()
        return *results, logits.grad

    results = run(batch["logits"], "triton")
    plain = run(batch["logits"], "reference")
    truth = run(batch["logits"].double(), "reference")
    for value, baseline, exact in zip(results, plain, truth, strict=True):
        assert error(value, exact) <= 2 * error(baseline, exact) + 1e-6 * scale_of(exact)


@pytest.mark.gpu
def test_large_logits_lose_nothing() -> None:
    """Shifted by 1000 nothing changes but the rounding of the inputs. The interpreter does not
    fuse multiply-adds, so this holds on a GPU only."""
    batch = make_batch(vocab=32000, dtype=torch.float16)
    batch["logits"] += 1000
    check(batch)


def test_results_repeat_bit_for_bit() -> None:
    batch = make_batch(vocab=1500)
    spec = LossSpec(kl_coef=0.1, entropy_coef=0.1)
    (first, first_grad), (second, second_grad) = (
        evaluate(batch, backend="triton", spec=spec) for _ in range(2)
    )
    for name in FIELDS:
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    assert torch.equal(first_grad, second_grad)


@pytest.mark.skipif(DEVICE == "cuda", reason="maps host memory")
def test_addresses_are_64_bit(small_tiles: None) -> None:
    """Rows 2^30 words apart in memory that exists only where it is touched: 2 x 2^30 words from
    the start, a 32-bit product of row and stride is negative."""
    stride, vocab = 2**30, 40
    memory = mmap.mmap(-1, 2 * (2 * stride + vocab), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    far = torch.frombuffer(memory, dtype=torch.bfloat16)
    rows = torch.randn(3, vocab).bfloat16()
    targets = torch.tensor([1, 2, 3])
    ones, zeros = torch.ones(3), torch.zeros(3)
    expected = torch.empty(1, 3, vocab, dtype=torch.bfloat16)
    stats = backend.row_stats(rows[None], targets, 1.0)
    backend.row_grads(rows[None], targets, stats[2], stats[1], ones, zeros, 1.0, expected)
    for shape, strides in (((1, 3, vocab), (0, stride, 1)), ((3, 1, vocab), (stride, 0, 1))):
        logits = far.as_strided(shape, strides)
        logits.copy_(rows.view(shape))
        for value, exact in zip(backend.row_stats(logits, targets, 1.0), stats, strict=True):
            assert torch.equal(value, exact)
        backend.row_grads(logits, targets, stats[2], stats[1], ones, zeros, 1.0, logits)
        assert torch.equal(logits.view(-1, vocab), expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaling_in_place(dtype: torch.dtype) -> None:
    flat = torch.randn(10_007, device=DEVICE).to(dtype)
    wide = torch.randn(2, 3, 20, device=DEVICE).to(dtype)
    columns = torch.randn(4, 6, device=DEVICE).to(dtype)
    for tensor in (flat, wide[:, ::2, 3:17], columns.t(), flat[:0]):
        expected = (tensor.float() * 0.3).to(dtype)
        around = wide.clone()
        backend.scale_(tensor, torch.tensor(0.3, device=DEVICE))
        exact = DEVICE == "cuda" or dtype == torch.float32  # the interpreter truncates bfloat16
        torch.testing.assert_close(tensor, expected, rtol=0 if exact else 2**-7, atol=0)
        if tensor.dim() == 3:
            assert torch.equal(wide[:, 1], around[:, 1])


def test_scaling_by_one_does_not_touch_the_tensor() -> None:
    """Read-only memory: a store would be a crash, so it runs in a process of its own."""
    code = """
import mmap, torch
from gac_kernels.backends import triton
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
tensor = torch.frombuffer(memory, dtype=torch.float32)
triton.scale_(tensor, torch.tensor(1.0))
print(tensor.sum().item())
"""
    if DEVICE == "cuda":
        pytest.skip("maps host memory")
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True)
    assert run.stdout.strip() == b"0.0", run.stderr.decode()


def test_it_says_why_it_cannot_run() -> None:
    reason = backend.unavailable(torch.device(DEVICE), torch.float64)
    assert reason is not None and "float64" in reason
    code = """
import torch
from gac_kernels.backends import triton
print(triton.unavailable(torch.device("cpu"), torch.float32))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "TRITON_INTERPRET" in run.stdout, run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151936, 152064, 128256, 32000])
def test_real_vocabularies(vocab: int, poison: None) -> None:
    batch = make_batch(rows=6, width=5, vocab=vocab, dtype=torch.bfloat16, peak=14.0)
    check(batch, spec=LossSpec(kl_coef=0.1, entropy_coef=0.01))


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits() -> None:
    """The last rows lie beyond what 32 bits address; each is held against its own small batch."""
    vocab = 151936
    rows = 2**31 // vocab + 8
    logits = torch.empty(1, rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    for part in logits.split(1024, dim=1):
        part.normal_()
    targets = torch.randint(vocab, (1, rows), device=DEVICE)
    last = logits[:, -8:].clone()
    sides = torch.zeros(1, dtype=torch.bool, device=DEVICE), torch.ones(1, device=DEVICE)
    is_demo, advantages = sides
    logits.requires_grad_()
    out = fused_gac_loss(logits, targets, advantages, is_demo, mu=0.0, backend="triton")
    out.loss.backward()
    exact = last.double().requires_grad_()
    few = reference.fused_gac_loss(
        exact, targets[:, -8:], advantages, is_demo, mu=0.0, rollout_norm=rows / 8
    )
    few.loss.backward()
    assert error(out.logps[:, -8:], few.logps) < 2e-4
    assert error(out.entropy[:, -8:], few.entropy) < 2e-4
    grad = logits.grad[:, -8:]
    assert error(grad, exact.grad) <= 2**-8 * exact.grad.abs().max().item()
    assert logits.grad[:, :1].any() and logits.grad[:, rows // 2].any()


@pytest.mark.gpu
def test_more_rows_than_a_grid_dimension_other_than_x() -> None:
    targets = torch.randint(64, (70_000,), device=DEVICE)
    logits = torch.randn(1, 70_000, 64, device=DEVICE)
    logps, entropy, _ = backend.row_stats(logits, targets, 1.0)
    exact = reference.token_logprobs(logits[0].double(), targets)
    assert error(logps, exact[0]) < 2e-6 and error(entropy, exact[1]) < 2e-6


@pytest.mark.gpu
def test_large_results_repeat_bit_for_bit() -> None:
    batch = make_batch(rows=64, width=16, vocab=152064, dtype=torch.bfloat16, peak=14.0)
    first, second = (evaluate(batch, backend="triton") for _ in range(2))
    for name in FIELDS:
        equal = torch.equal(getattr(first[0], name), getattr(second[0], name))
        assert equal or (name == "kl" and first[0].kl.isnan()), name
    assert torch.equal(first[1], second[1])


@pytest.mark.gpu
def test_row_kernels_record_in_a_cuda_graph() -> None:
    """No kernel asks the host for anything: replaying on new logits gives their results."""
    batch = make_batch(rows=4, width=8, vocab=32000, dtype=torch.bfloat16)
    logits, targets = batch["logits"], batch["targets"].flatten()
    ones, zeros = torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE)
    out = torch.empty_like(logits)
    factor = torch.tensor(0.5, device=DEVICE)

    def work() -> tuple[Tensor, ...]:
        logps, entropy, lse = backend.row_stats(logits, targets, 1.0)
        backend.row_grads(logits, targets, lse, entropy, ones, zeros, 1.0, out)
        backend.scale_(out, factor)
        return logps, entropy

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # compiles, which a recording may not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    replayed = [x.clone() for x in (*recorded, out)]
    for value, exact in zip(replayed, (*work(), out), strict=True):
        assert torch.equal(value, exact)


@pytest.mark.gpu
def test_whole_loss_records_in_a_cuda_graph() -> None:
    batch = make_batch(rows=4, width=8, vocab=32000, dtype=torch.bfloat16)
    batch["mu"] = torch.tensor(0.3, device=DEVICE)
    logits = batch.pop("logits")

    def work() -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        out = fused_gac_loss(leaf, backend="triton", **batch)
        return out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    replayed = [x.clone() for x in recorded]
    for value, exact in zip(replayed, work(), strict=True):
        assert torch.equal(value, exact)


@pytest.mark.gpu
def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits = torch.randn(1, 4, 1000, device="cuda:1")
    targets = torch.randint(1000, (4,), device="cuda:1")
    logps, _, _ = backend.row_stats(logits, targets, 1.0)
    exact, _ = reference.token_logprobs(logits[0].double(), targets)
    assert error(logps, exact) < 2e-6


@pytest.mark.gpu
def test_new_batch_sizes_compile_nothing() -> None:
    """Rows, row length and temperature are run-time values: only the first call compiles."""
    from gac_kernels.backends.triton_rows import loss_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in loss_kernel.device_caches.values())

    evaluate(make_batch(rows=3, width=2, vocab=512), backend="triton")
    before = compiled()
    for rows, width, temperature in ((1, 1, 1.0), (16, 16, 0.7), (5, 7, 1.3)):
        batch = make_batch(rows=rows, width=width, vocab=512)
        evaluate(batch, backend="triton", spec=LossSpec(temperature=temperature))
    assert before >= 1 and compiled() == before
