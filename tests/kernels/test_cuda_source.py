"""The CUDA row kernels without a GPU: the real source on emulated threads, and nvcc's resource
reports.

Tolerance: 2 x the error of float32 PyTorch on the same inputs, both against float64, plus 1e-6.
"""

import ctypes
import json
import operator
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench import roofline
from bench.sass import assembly, per_logit
from gac_kernels import build_cuda, inspect, reference
from gac_kernels.backends import cuda
from gac_kernels.contract import LossSpec
from gac_kernels.tokens import BatchInputs, Scaling, Tokens, Upstream
from tests.kernels.cases import in_float64
from tests.kernels.cuda_emulation import batch


def close(ours: Tensor, theirs: Tensor, truth: Tensor, what: str, atol: float = 1e-6) -> None:
    assert torch.equal(ours.isnan(), truth.isnan()), f"{what}: NaNs at different positions"
    error = (ours.double() - truth).nan_to_num(0).abs()
    allowed = 2 * (theirs.double() - truth).nan_to_num(0).abs().max() + atol
    worst = error.argmax()
    assert error.max() <= allowed, (
        f"{what}: {ours.flatten()[worst]} is not {truth.flatten()[worst]} "
        f"(error {error.max():.2e}, allowed {allowed:.2e})"
    )


def check_loss(logits: Tensor, tokens: Tokens, spec: LossSpec, out: Tensor) -> None:
    """Compare the kernels' row_loss with float32 and float64 PyTorch."""
    like = torch.empty(logits.shape, dtype=torch.float32)
    theirs = reference.row_loss(logits.float(), tokens, spec, like)
    exact = torch.empty(logits.shape, dtype=torch.float64)
    truth = reference.row_loss(logits.double(), in_float64(tokens), spec, exact)
    rounded = like.to(out.dtype)  # the reference's gradient in the dtype of ours
    ours = cuda.row_loss(logits, tokens, spec, out)
    for name, a, b, c in zip(ours._fields, ours, theirs, truth, strict=True):
        close(a, b, c, name, atol=2e-6)
    close(out, rounded, exact, "gradient", atol=2e-6 * tokens.scale.max().item())
    assert (out[tokens.targets.view(logits.shape[:2]) == -100] == 0).all()


# reason -> (dtype, gradient dtype, V, blocks, tiles)
SHAPES = {
    "a whole number of tiles": (torch.float32, torch.float32, 8192, 4, 2),
    "a word with few valid logits at each end": (torch.bfloat16, torch.bfloat16, 9001, 2, 3),
    "fewer 16-byte words than blocks": (torch.float16, torch.float16, 11, 4, 2),
    "one logit": (torch.float32, torch.float32, 1, 2, 2),
    "the linear form: float32 in, bfloat16 out": (torch.float32, torch.bfloat16, 5003, 2, 4),
    "a full ring, no space to prefetch": (torch.bfloat16, torch.bfloat16, 16377, 1, 4),
    "eight blocks": (torch.bfloat16, torch.bfloat16, 40000, 8, 3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(split_rows, name: str) -> None:
    dtype, out_dtype, vocab, blocks, tiles = SHAPES[name]
    split_rows(blocks, tiles)
    logits = (3 * torch.randn(2, 3, vocab)).to(dtype)
    out = torch.full(logits.shape, torch.nan, dtype=out_dtype)
    check_loss(logits, batch(logits, LossSpec()), LossSpec(), out)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_unused_dtypes_are_rejected(kernels: ctypes.CDLL, out_dtype) -> None:
    logits = torch.randn(2, 3, 300).bfloat16()
    tokens = batch(logits, LossSpec())
    with pytest.raises(RuntimeError, match="gradient of the same dtype"):
        cuda.row_loss(logits, tokens, LossSpec(), torch.empty(logits.shape, dtype=out_dtype))


def test_rows_of_any_stride_leave_their_neighbors_unchanged(split_rows) -> None:
    """logits[:, :-1, :-2] of a larger tensor: rows are unaligned, and the memory between them must
    not change.
    """
    split_rows(2, 3)
    logits = torch.randn(2, 4, 2005)[:, :-1, :-2]
    full = torch.full((2, 4, 2005), 7.0)
    check_loss(logits, batch(logits, LossSpec()), LossSpec(), full[:, 1:, 1:-1])
    assert (full[:, 0] == 7).all()
    assert (full[:, :, 0] == 7).all()
    assert (full[:, :, -1] == 7).all()


@pytest.mark.parametrize("target", [41, 42])
def test_a_target_outside_the_row_changes_no_other_row(split_rows, target: int) -> None:
    """Also if the last 16-byte word of the row would have room for it."""
    split_rows(1, 1)
    logits, targets, ones = torch.randn(1, 2, 41), torch.tensor([3, target]), torch.ones(2)
    lse, storage = logits.logsumexp(-1)[0], torch.full((96,), 7.0)
    out = storage[:82].view(1, 2, 41)
    cuda.row_grads(logits, targets, Scaling(1.0), Upstream(lse, ones, ones, 0 * ones), out)
    expected = torch.nn.functional.one_hot(targets[0], 41) - logits[0, 0].softmax(-1)
    torch.testing.assert_close(out[0, 0], expected)
    assert (storage[82:] == 7).all()


def test_logits_around_the_steep_threshold(split_rows) -> None:
    """From log2(e) x = 65536 on, exponents are computed differently, possibly in only part of a
    row.
    """
    split_rows(2, 3)
    base = torch.tensor([4e4, 45425.0, 45427.0, -45426.0, 1e6, 45426.0])
    logits = base[:, None] + torch.randn(6, 9001)
    logits[5] += torch.linspace(-3, 3, 9001)  # from below to above
    logits[4, ::2] = 3.0
    targets = torch.tensor([9000, 1, 2, 8999, 5, 4400])
    d_logps, d_entropy = torch.randn(6), torch.randn(6)
    # log_softmax subtracts the maximum first; the reference does not
    log_probs = logits.double().log_softmax(-1)
    true_entropy = -(log_probs.exp() * log_probs).sum(-1)
    true_lse = logits[:, 0].double() - log_probs[:, 0]
    logps, entropy, _ = cuda.row_stats(logits[None], targets, Scaling(1.0))
    torch.testing.assert_close(
        logps.double(), log_probs.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=2e-6
    )
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=1e-6, atol=2e-6)
    out, exact = torch.empty(1, 6, 9001), torch.empty(1, 6, 9001, dtype=torch.float64)
    wide = Upstream(true_lse, true_entropy, d_logps.double(), d_entropy.double())
    reference.row_grads(logits[None].double(), targets, Scaling(1.0), wide, exact)
    upstream = Upstream(d_logps, d_logps, d_logps, d_entropy)
    cuda.row_grads(logits[None], targets, Scaling(1.0), upstream, out)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-7)


def test_results_do_not_depend_on_thread_order(kernels: ctypes.CDLL, split_rows) -> None:
    """Ring buffers are much smaller than the work; schedules and copy delays vary."""
    split_rows(4, 3)
    logits = torch.randn(2, 6, 16001).bfloat16()
    tokens = batch(logits, LossSpec(entropy_coef=0.01))
    results = []
    for seed in range(4):
        kernels.gac_emulate_seed(seed)
        out = torch.empty_like(logits)
        results.append([out, *cuda.row_loss(logits, tokens, LossSpec(entropy_coef=0.01), out)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_row_that_does_not_fit_is_rejected(split_rows) -> None:
    logits = torch.zeros(1, 1, 16384)
    targets = torch.zeros(1, dtype=torch.int64)
    zero = torch.zeros(1)
    split_rows(2, 4)
    with pytest.raises(RuntimeError, match="row does not fit .*shared memory"):
        cuda.row_grads(logits, targets, Scaling(1.0), Upstream(zero, zero, zero + 1, zero), logits)


def test_impossible_launches_are_rejected(kernels: ctypes.CDLL) -> None:
    def reason(**fields: int) -> str:
        huge = {"rows": 1, "per_batch": 1, "vocab": 10**9, "cluster": 1, "slots": 28, "out": 1}
        error = kernels.gac_cuda_rows(ctypes.byref(cuda.Arguments(**(huge | fields))), None)
        return (error or b"").decode()

    assert "does not fit" in reason()
    assert [c for c in range(17) if "cluster must" not in reason(cluster=c)] == [1, 2, 4, 8]
    assert [s for s in range(-1, 31) if "slots must" not in reason(slots=s)] == list(range(1, 29))
    pairs = [
        (i, o) for i in range(3) for o in range(3) if "half" not in reason(dtype=i, out_dtype=o)
    ]
    assert pairs == [(0, 0), (0, 1), (0, 2), (1, 1), (2, 2)]
    masked, out = torch.tensor([-100]), torch.zeros(70000)
    data = {"targets": masked.data_ptr(), "logits": out.data_ptr(), "out": out.data_ptr()}
    for dtype, width, cluster, slots in ((0, 4, 4, 1), (1, 8, 1, 3), (2, 8, 2, 2)):
        # all tiles are full if the row starts at the last logit of its first 16-byte word
        largest = (slots * cluster * 512 - 1) * width + 1
        split = {"dtype": dtype, "out_dtype": dtype, "cluster": cluster, "slots": slots}
        assert reason(vocab=largest, **data, **split) == ""
        assert "does not fit" in reason(vocab=largest + 1, **data, **split)
    assert reason(vocab=largest + 1, slots=1, **data | {"out": 0}) == ""


def test_split_of_the_common_vocabularies() -> None:
    bf16, f32 = torch.bfloat16, torch.float32
    assert cuda.split(152064, bf16, keep_row=True) == (4, 14)
    assert cuda.split(32000, bf16, keep_row=True) == (1, 14)
    assert cuda.split(152064, f32, keep_row=True) == (8, 14)
    # 26 tiles per block of four would leave no space to prefetch
    assert [cuda.split(v, f32, keep_row=True) for v in (262144, 4 * 26 * 2048)] == [(8, 28)] * 2
    assert cuda.split(10**9, f32, keep_row=False) == (1, 14)
    # 8 x 27 tiles of 2048 logits, of which a row without alignment may have 3 fewer
    assert cuda.split(8 * 27 * 2048 - 3, f32, keep_row=True) == (8, 28)
    with pytest.raises(ValueError, match="V=442366 in torch.float32"):
        cuda.split(8 * 27 * 2048 - 2, f32, keep_row=True)


@pytest.mark.full(reason="nvcc takes a minute")
@pytest.mark.parametrize("arch", ["90", "100"])
def test_compiled_kernels_meet_their_limits(arch: str) -> None:
    """No spills; two blocks of 14 tiles fit on a multiprocessor, or three of 9; no
    more instructions per logit than recorded; the instructions the design relies on are present.
    """
    if (nvcc := build_cuda.find_nvcc()) is None:
        pytest.skip("needs nvcc")
    counts = json.loads(roofline.COUNTS.read_text())
    kernels = list(inspect.compile_cuda(arch))
    assert len({(k.kernel, k.config) for k in kernels}) == len(kernels) == 5
    assert all(k.spills == k.stack == 0 for k in kernels)
    for kernel in kernels:
        assert kernel.registers <= 72
        assert 3 * 72 * 288 <= 65536
        assert (kernel.shared + 1024) * 2 <= 228 * 1024 >= (cuda.shared_bytes(9) + 1024) * 3
        name, counted = f"{kernel.kernel} {kernel.config}", [*per_logit(kernel)]
        recorded = counts[kernel.arch][name]
        assert all(map(operator.le, counted, recorded)), f"{name}: {counted}"
        if ".".join(map(str, build_cuda.release(nvcc))) == counts["nvcc"]:
            assert counted == recorded, (
                "fewer instructions than recorded; rerun python -m bench.roofline --count"
            )
        for instruction in ("UBLKCP.S.G", "STAS.128", "LDS.128", "STG.E.EF."):
            assert instruction in assembly(kernel), f"{name} has no {instruction}"


def test_unavailable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")

    def reason() -> str | None:
        return cuda.unavailable(device, torch.float32)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason() == "there is no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert reason() == "L4 does not have compute capability 9.0 or 10.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert "not torch.float64" in cuda.unavailable(device, torch.float64)
    monkeypatch.setattr(cuda, "_library_error", cuda._library_error.__wrapped__)
    for error in (RuntimeError, OSError):
        monkeypatch.setattr(cuda, "library", mock.Mock(side_effect=error("no compiler")))
        assert reason() == "no compiler"
    monkeypatch.setattr(cuda, "library", lambda: None)
    assert reason() is None


@pytest.mark.parametrize("inner", ["triton", "reference"])
def test_what_the_kernels_do_not_support_runs_elsewhere(
    inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softcaps, further outputs and the work per batch; by Triton if it is available."""
    if inner == "reference":
        monkeypatch.setattr(cuda.triton, "unavailable", lambda *_: "not installed")
    logits, spec = 3 * torch.randn(2, 3, 40), LossSpec(kl_coef=0.1, temperature=0.7)
    tokens = batch(logits, spec)
    upstream = Upstream(*torch.rand(4, 6))
    scaling, capping = Scaling(0.7), Scaling(0.7, softcap=2.0)

    def results(backend: ModuleType) -> list[Tensor]:
        outs = torch.empty(2, *logits.shape).unbind()
        stats = backend.row_stats(logits, tokens.targets, scaling, more_outputs=True)
        capped = backend.row_stats(logits, tokens.targets, capping)
        backend.row_grads(logits, tokens.targets, capping, upstream, outs[0])
        terms = backend.row_loss(logits, tokens, spec, outs[1], softcap=2.0)
        inputs = BatchInputs(tokens.targets.view(2, 3), torch.randn(2), torch.tensor([True, False]))
        scaled = torch.ones(3)
        backend.scale_(scaled, torch.tensor(3.0))
        *sums, moments, _ = backend.reduce(tokens, terms, True)
        planned = backend.plan(inputs, spec)
        return [*stats, *capped, *outs, *terms, scaled, *sums, moments.rollouts, planned.scale]

    rows, functions = getattr(cuda, inner), []
    for name in ("plan", "reduce", "row_stats", "row_grads", "row_loss", "scale_"):
        functions.append(mock.Mock(wraps=getattr(rows, name)))
        monkeypatch.setattr(rows, name, functions[-1])
    torch.manual_seed(0)
    ours = results(cuda)
    assert all(function.called for function in functions)
    monkeypatch.undo()
    torch.manual_seed(0)
    for x, y in zip(ours, results(reference), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, check_dtype=False)
