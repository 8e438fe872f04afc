"""The LM head's GEMMs: chunk sizes, memory, output precision and launch order."""

import pytest
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from gac_kernels import (
    LossSpec,
    backends,
    fused_linear_gac_loss,
    fused_linear_token_loss,
    linear_token_logprobs,
    projection,
    reference,
    shards,
)
from gac_kernels.projection import Projection, spans
from gac_kernels.tokens import BatchInputs
from tests.kernels.cases import (
    BY_NAME,
    LEAVES,
    Batch,
    build,
    check_grads,
    check_outputs,
    each_backend,
    require_backend,
    run_linear,
)
from tests.kernels.emulated_gemm import Gemm, emulate
from tests.kernels.test_linear_memory import PeakMemory

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
V, H = 101, 24


@HALF
@each_backend
def test_half_operands(
    backend: str, dtype: torch.dtype, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of logits are float32; a chunk's gradients are rounded to the operands' dtype."""
    log = emulate(monkeypatch, dtype)
    batch = build(BY_NAME["k2"], dtype)
    truth, d_truth = run_linear(reference.fused_linear_gac_loss, batch.to(torch.float64))
    same_dtype, d_same_dtype = run_linear(reference.fused_linear_gac_loss, batch)
    # enough for 2 rows of float32 logits and 9 rows of gradients: several chunks of several blocks
    chunk_bytes = (2 * 4 + 9 * 2) * V
    out, d_ours = run_linear(fused_linear_gac_loss, batch, backend=backend, chunk_bytes=chunk_bytes)
    assert {shape[0] for shape, _, _ in log if shape[1:] == (H, V)} == {1, 2}
    assert max(shape[1] for shape, _, _ in log if shape[0] == V) > 2
    check_outputs(out, same_dtype, truth)
    # as in any half-precision backward, the gradient of the logits is rounded once for its GEMMs
    check_grads(LEAVES, d_ours, d_same_dtype, d_truth, torch.finfo(dtype).eps)


@HALF
def test_half_operands_of_the_logprobs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = build(BY_NAME["entropy"], dtype)

    def grads(call, x: Batch, **keywords) -> tuple[Tensor, ...]:
        logps, entropy = call(x.hidden, x.weight, x.targets, bias=x.bias, **keywords)
        return torch.autograd.grad(
            (2 * logps - entropy.square()).mean(), (x.hidden, x.weight, x.bias)
        )

    truth = grads(reference.linear_token_logprobs, batch.to(torch.float64))
    same_dtype = grads(reference.linear_token_logprobs, batch)
    emulate(monkeypatch, dtype)
    check_grads(
        LEAVES,
        grads(linear_token_logprobs, batch, chunk_bytes=26 * V),
        same_dtype,
        truth,
        torch.finfo(dtype).eps,
    )


class HalfProducts(TorchDispatchMode):
    """Counts the half-precision matrix products that PyTorch executes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm"):
            self.count += args[-1].dtype in (torch.bfloat16, torch.float16)
        return func(*args, **(kwargs or {}))


def test_gemms_with_partial_sums_write_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM with bfloat16 output may also keep its partial sums in bfloat16."""
    log = emulate(monkeypatch, torch.bfloat16)
    with HalfProducts() as products:
        run_linear(fused_linear_gac_loss, build(BY_NAME["k2"], torch.bfloat16), chunk_bytes=26 * V)
    assert products.count == 0
    assert {(V, H), (H, V)} <= {shape[1:] for shape, _, _ in log}
    assert {out for _, out, _ in log} == {torch.float32}


def weight_gemms(log: list[Gemm]) -> list[Gemm]:
    return [gemm for gemm in log if gemm.shape[0] == V and gemm.shape[2] == H]


def test_single_chunk_writes_bfloat16_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, a small weight, a float32 weight and float16 need float32 instead."""
    batch = build(BY_NAME["k2"], torch.bfloat16)
    log = emulate(monkeypatch, torch.bfloat16)
    via_float32, d_via_float32 = run_linear(fused_linear_gac_loss, batch)
    assert [gemm.out for gemm in weight_gemms(log)] == [torch.float32]
    monkeypatch.setattr(projection, "NO_SPLIT_K", 0)
    log.clear()
    direct, d_direct = run_linear(fused_linear_gac_loss, batch)
    assert [gemm[1:] for gemm in weight_gemms(log)] == [(torch.bfloat16, False)]
    assert torch.equal(direct.loss, via_float32.loss)
    assert all(torch.equal(x, y) for x, y in zip(d_direct, d_via_float32, strict=True))
    log.clear()
    run_linear(fused_linear_gac_loss, batch, chunk_bytes=26 * V)
    assert len(weight_gemms(log)) > 1
    assert {gemm.out for gemm in weight_gemms(log)} == {torch.float32}
    monkeypatch.setenv("GAC_WEIGHT_SUM", "bfloat16")
    log.clear()
    d_chunks = run_linear(fused_linear_gac_loss, batch, chunk_bytes=26 * V)[1]
    chunks = [gemm[1:] for gemm in weight_gemms(log)]
    assert chunks == [(torch.bfloat16, i > 0) for i in range(len(chunks))]
    rounding = len(chunks) * torch.finfo(torch.bfloat16).eps / 2 * d_direct[1].abs().max().item()
    torch.testing.assert_close(d_chunks[1], d_direct[1], rtol=0, atol=rounding)
    with torch.autocast("cpu", torch.bfloat16):  # a float32 weight's gradient is never rounded
        log.clear()
        grads = run_linear(fused_linear_gac_loss, batch.to(torch.float32))[1]
    assert [gemm.out for gemm in weight_gemms(log)] == [torch.float32]
    assert grads[1].dtype == torch.float32
    log = emulate(monkeypatch, torch.float16)  # its gradients are unscaled in float32
    run_linear(fused_linear_gac_loss, build(BY_NAME["k2"], torch.float16))
    assert [gemm.out for gemm in weight_gemms(log)] == [torch.float32]


def head(
    vocab_size: int,
    hidden_size: int = 8,
    dtype: torch.dtype = torch.float32,
    chunk_bytes: int | None = None,
) -> Projection:
    weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device="meta")
    return Projection(weight, None, dtype, chunk_bytes)


def test_float32_chunks_have_a_single_block() -> None:
    large = head(1000, chunk_bytes=1_100_000)
    assert (large.block, large.chunk) == (272, 272)  # 275 rows fit: rounded down to GEMM tiles
    assert head(1000, chunk_bytes=1).chunk == 1
    sizes = [projection.chunk_sizes(128 << 20, v, 1, (4, 4), 1)[0] for v in (32000, 151936)]
    # on a CPU: 64 MiB, or as much as 512 rows need, up to 128 MiB
    assert [*sizes, Projection(torch.empty(1000, 1), None, torch.float32).chunk] == [
        512,
        208,
        16768,
    ]


@pytest.mark.parametrize(
    ("vocab_size", "hidden_size"), [(152064, 3584), (151936, 1536), (32000, 4096)]
)
def test_block_and_chunk_sizes_on_a_gpu(
    vocab_size: int, hidden_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every head stays below 1 GiB, including the rows of hidden and their gradient.

    For Qwen's heads, the logits GEMM fills exactly 18 waves on 132 multiprocessors, and the
    backward GEMMs get 2304 rows.
    """
    emulate(monkeypatch, torch.bfloat16)
    large = head(vocab_size, hidden_size, torch.bfloat16)
    if vocab_size > 150_000:
        assert (large.block, large.chunk) == (512, 2304)
    total_bytes = 4 * large.block * vocab_size
    total_bytes += 2 * large.chunk * (vocab_size + 2 * hidden_size)
    budget = projection.CHUNK_BYTES["cuda"]
    assert 0.95 * budget < total_bytes <= budget < 2**30
    # the float32 gradient of hidden fits in the logits block
    assert large.block * vocab_size > large.chunk * hidden_size
    small = head(vocab_size, 8, torch.bfloat16, chunk_bytes=1)
    assert (small.block, small.chunk) == (1, 1)
    assert large.block % 256 == 0
    assert large.block <= 1536


def test_unequal_vocabulary_shards_use_the_same_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate(monkeypatch, torch.bfloat16)
    shards = [torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (76033, 75000)]
    sizes = {
        (p.chunk, p.block)
        for p in (Projection(x, None, torch.bfloat16, None, 76033) for x in shards)
    }
    assert len(sizes) == 1


def test_spans_are_full_or_nearly_equal() -> None:
    def sizes(stop: int, rows: int, equal: bool) -> list[int]:
        found = [*spans(10, stop, rows, equal=equal)]
        assert [x.start for x in found[1:]] == [x.stop for x in found[:-1]]
        return [x.stop - x.start for x in found]

    assert sizes(530, 256, equal=True) == [256, 256, 8]
    assert sizes(10, 256, equal=True) == []
    assert sizes(10 + 8192, 1536, equal=True) == [1408] * 4 + [1280] * 2  # 64 tiles in six chunks
    assert sizes(10 + 2304, 512, equal=True) == [512, 512, 512, 384, 384]
    assert sizes(10 + 2304, 512, equal=False) == [512] * 4 + [256]
    assert sizes(10, 256, equal=False) == []


def test_a_gpus_chunks_keep_the_size_that_fills_its_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of hidden takes 13 waves of 132 tiles; seven chunks of equal size take 14."""
    emulate(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(projection, "multiprocessors", lambda device: 132)
    small = head(151936, 1536, torch.bfloat16)
    rows = [x.stop - x.start for x in small.spans(0, 7 * 2816, 2816)]
    assert rows == [2816] * 7
    rows = [x.stop - x.start for x in small.spans(0, 32768, 5248)]
    assert rows == [5248] * 6 + [1280]
    waves = [-(-(-(-n // 128) * 6) // 132) for n in rows]
    assert sum(waves) == 13


def test_memory_of_half_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory is one block of logits plus one chunk of gradients.

    The float32 gradient of hidden reuses the logits buffer.
    """
    vocab_size, hidden_size = 4001, 64
    hidden = torch.randn(1, 130, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16)
    batch = torch.randint(vocab_size, (1, 130)), torch.ones(1), torch.tensor([False])
    budget = 10 * 4 * vocab_size + 45 * 2 * (vocab_size + 2 * hidden_size)

    def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        """Multiply one row at a time, so that the emulation itself uses almost no memory."""
        for x, y in zip(a, out, strict=True):
            y.copy_((x[None] @ b)[0].float())

    emulate(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(projection, "multiply", multiply)
    with PeakMemory() as memory:
        fused_linear_gac_loss(hidden, weight, *batch, chunk_bytes=budget, backend="native", mu=0.5)
    lower_bound = (10 * 4 + 44 * 2) * vocab_size  # the longest of three chunks has 44 rows
    # margin for hidden's rows and gradient, and per-token vectors
    assert lower_bound <= memory.peak <= lower_bound + 110_000


@pytest.mark.parametrize("devices", [set(), {"cpu"}], ids=["counts first", "GEMM first"])
@pytest.mark.parametrize(("tokens", "live"), [(5, 5), (13, 13), (30, 3)])
def test_the_buffer_of_logits_has_no_more_rows_than_a_gemm(
    tokens: int, live: int, devices: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of up to 8 rows, as on a GPU: a row of logits takes 600 kB at V = 152064."""
    log = emulate(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(projection, "multiprocessors", lambda device: 132)
    monkeypatch.setattr("gac_kernels.linear.ASYNCHRONOUS", devices)
    reserved: list[int] = []
    reserve = Projection.reserve

    def recorded(projection: Projection, rows: int) -> None:
        reserve(projection, rows)
        assert projection._logits.storage is not None
        reserved.append(len(projection._logits.storage))

    monkeypatch.setattr(Projection, "reserve", recorded)
    hidden = torch.randn(1, tokens, H).bfloat16().requires_grad_()
    weight, targets = torch.randn(V, H).bfloat16(), torch.randint(V, (1, tokens))
    targets[:, live:] = -100
    fused_linear_gac_loss(
        hidden, weight, targets, torch.ones(1), chunk_bytes=(8 * 4 + 36 * 2) * V, backend="native"
    )
    rows = [gemm.shape[0] for gemm in log if gemm.shape[1:] == (H, V)]
    assert max(rows) == min(tokens if devices else live, 8)
    assert set(reserved) == {max(rows)}


VIEWS = {
    "alias",
    "slice",
    "t",
    "transpose",
    "view",
    "detach",
    "empty",
    "permute",
    "unsqueeze",
    "new_empty",
}


class Launches(TorchDispatchMode):
    """Records the names of the operators in order, and of host synchronizations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        tolist = Tensor.tolist

        def recorded(x: Tensor) -> list:
            self.names.append("sync")
            return tolist(x)

        monkeypatch.setattr(Tensor, "tolist", recorded)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_only_index_select_runs_between_sync_and_first_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the synchronization the device is idle: every launch before the GEMM adds latency."""
    batch = build(BY_NAME["k2"])
    leaves = batch.hidden, batch.weight
    with Launches(monkeypatch) as launches:
        out = fused_linear_gac_loss(*leaves, *batch.inputs, **batch.keywords)
        forward, launches.names = launches.names, []
        logps, _ = linear_token_logprobs(*leaves, batch.targets)
        stats, launches.names = launches.names, []
        logps.sum().backward()
        backward = launches.names
    assert out.loss.isfinite()
    for names in (forward, stats, backward):
        assert names.count("sync") == 1
        sync = names.index("sync")
        before = set(names[:sync])
        assert {"argsort", "sort"} & before
        assert {"zeros", "new_zeros"} & before
        between = names[sync + 1 : names.index("mm", sync)]
        assert [name for name in between if name not in VIEWS] == ["index_select"]


AHEAD = {
    "every row has a gradient": ([1.0, 1, 1, 1], 8, None),
    "several chunks": ([1.0, 1, 1, 1], 8, (2 * 4 + 9 * 2) * V),
    "fewer rows than a block have a gradient": ([1.0, 0, 0, 0], 8, None),
    "a block with and without a gradient, then others": ([1.0, 0, 0, 0], 8, (10 * 4 + 19 * 2) * V),
    "no row has a gradient": ([0.0, 0, 0, 0], 8, None),
    "tokens without a loss": ([1.0, 0, 1, 0], 3, None),
    "no token has a loss": ([1.0, 1, 1, 1], 0, None),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", AHEAD)
def test_the_first_gemm_is_launched_before_the_counts_are_read(
    name: str, dtype: torch.dtype, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device for which the host waits; the results do not depend on it."""
    advantages, length, chunk_bytes = AHEAD[name]
    log = emulate(monkeypatch, dtype)
    hidden = torch.randn(4, 8, H)
    weight, targets = torch.randn(V, H), torch.randint(V, (4, 8))
    targets[:, length:] = -100
    hidden[targets == -100] = torch.nan
    waits: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: waits.append(len(log)) or tolist(x))

    def run(devices: set[str]) -> list[Tensor]:
        log.clear()
        waits.clear()
        monkeypatch.setattr("gac_kernels.linear.ASYNCHRONOUS", devices)
        monkeypatch.setattr("gac_kernels.loss.ASYNCHRONOUS", devices)
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        results = []
        for spec in (LossSpec(), LossSpec(importance_sampling_level="sequence")):
            out = fused_linear_gac_loss(
                *leaves,
                targets,
                torch.tensor(advantages),
                old_logps=torch.full((4, 8), -4.0),
                spec=spec,
                chunk_bytes=chunk_bytes,
                backend="reference",
            )
            results += [out.loss, out.logps, *torch.autograd.grad(out.loss, leaves)]

        def token_loss(logps: Tensor, entropy: Tensor) -> Tensor:
            return torch.where(logps < -4, logps.square(), 0)

        out = fused_linear_token_loss(
            *leaves, targets, token_loss, chunk_bytes=chunk_bytes, backend="reference"
        )
        results += [out.loss, out.losses, *torch.autograd.grad(out.loss, leaves)]
        logps, _ = linear_token_logprobs(
            *leaves, targets, chunk_bytes=chunk_bytes, backend="reference"
        )
        return [*results, logps, *torch.autograd.grad(logps.sum(), leaves)]

    expected = run(set())
    assert waits[0] == 0
    found = run({"cpu"})
    assert waits[0] == 1
    for x, y in zip(found, expected, strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-6)


@pytest.mark.parametrize(("rows", "gemms"), [(16, 2), (8, 1)], ids=["one block", "two blocks"])
def test_two_passes_read_the_counts_where_they_are_needed(
    rows: int, gemms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first block has all rows, the first GEMM of the second pass is launched before."""
    log = emulate(monkeypatch, torch.float32)
    monkeypatch.setattr("gac_kernels.linear.ASYNCHRONOUS", {"cpu"})
    monkeypatch.setattr("gac_kernels.loss.ASYNCHRONOUS", {"cpu"})
    waits: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: waits.append(len(log)) or tolist(x))
    targets = torch.randint(V, (2, 8))
    targets[:, 5:] = -100
    fused_linear_gac_loss(
        torch.randn(2, 8, H, requires_grad=True),
        torch.randn(V, H),
        targets,
        torch.ones(2),
        old_logps=torch.full((2, 8), -4.0),
        spec=LossSpec(importance_sampling_level="sequence"),
        chunk_bytes=rows * 4 * V,
        backend="reference",
    )
    assert waits == [gemms]


def test_a_block_launches_a_row_kernel_and_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GEMM is not counted; inputs are gathered and results scattered once for all blocks."""
    emulate(monkeypatch, torch.bfloat16)
    multiply, row_loss = projection.multiply, reference.row_loss

    def gemm(*arguments, **keywords) -> None:
        launches.names.append("gemm")
        with no_dispatch():
            multiply(*arguments, **keywords)

    def rows(*arguments, **keywords):
        launches.names.append("row kernel")
        with no_dispatch():
            return row_loss(*arguments, **keywords)

    monkeypatch.setattr(projection, "multiply", gemm)
    monkeypatch.setattr(reference, "row_loss", rows)
    with Launches(monkeypatch) as launches:
        batch = build(BY_NAME["k2"], torch.bfloat16)
        run_linear(
            fused_linear_gac_loss, batch, backend="reference", chunk_bytes=(2 * 4 + 9 * 2) * V
        )
    first = launches.names.index("gemm")
    second = launches.names.index("gemm", first + 1)
    block = [name for name in launches.names[first + 1 : second] if name not in VIEWS]
    assert block == ["add_", "row kernel", "stack"]  # the first adds the bias


@pytest.mark.parametrize(
    ("vocab_size", "hidden_size", "tokens", "rows"),
    [(152064, 3584, 8192, 8192), (152064, 3584, 32768, 2304), (151936, 1536, 8192, 2304)],
)
def test_a_single_chunk_may_use_the_memory_of_the_float32_sum(
    vocab_size: int, hidden_size: int, tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This applies to Qwen2.5-7B with 8192 tokens, but not with a given budget or frozen weight."""
    emulate(monkeypatch, torch.bfloat16)
    large = head(vocab_size, hidden_size, torch.bfloat16)
    assert large.chunk_rows(tokens, weight_gradient=True) == rows
    assert large.chunk_rows(tokens, weight_gradient=False) == 2304
    assert large.chunk_rows(1000, weight_gradient=True) == 2304  # a single chunk in any case
    several = projection.CHUNK_BYTES["cuda"] + 4 * vocab_size * hidden_size
    assert 4 * large.block * vocab_size + 2 * rows * (vocab_size + 2 * hidden_size) <= several
    explicit = head(vocab_size, hidden_size, torch.bfloat16, chunk_bytes=1000 << 20)
    assert explicit.chunk_rows(tokens, weight_gradient=True) == 2304
    small = head(101, 24, torch.bfloat16)
    assert small.chunk_rows(10**9, weight_gradient=True) == small.chunk


def test_bfloat16_sums_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers take 1000 MiB at any number of tokens, and the gradient is its own sum."""
    emulate(monkeypatch, torch.bfloat16)
    sizes = 152064, 3584, torch.bfloat16
    assert head(*sizes).sum_dtype == torch.float32
    monkeypatch.setenv("GAC_WEIGHT_SUM", "bfloat16")
    large = head(*sizes)
    assert large.sum_dtype == torch.bfloat16
    assert large.chunk_rows(8192, weight_gradient=True) == large.chunk == 2304
    used = 4 * large.block * sizes[0] + 2 * large.chunk * (sizes[0] + 2 * sizes[1])
    assert 0.9 * (1000 << 20) < used <= 1000 << 20
    assert head(101, 24, torch.bfloat16).sum_dtype == torch.float32  # small: see NO_SPLIT_K
    backends.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="GAC_WEIGHT_SUM=bfloat16 has no effect here"):
        assert head(*sizes[:2], torch.float32).sum_dtype == torch.float32
    monkeypatch.setenv("GAC_WEIGHT_SUM", "half")
    with pytest.raises(ValueError, match="GAC_WEIGHT_SUM=half: use one of float32, bfloat16"):
        head(101, 24)


def test_rows_are_aligned_and_sizes_repeat_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any vocabulary gets rows of whole 128-byte lines; the values do not change."""
    batch = build(BY_NAME["k2"], torch.bfloat16)
    emulate(monkeypatch, torch.bfloat16)
    expected, d_expected = run_linear(fused_linear_gac_loss, batch, chunk_bytes=26 * V)
    monkeypatch.setattr(projection, "ROW_MULTIPLE", {"cpu": (64, 1024)})
    strides, multiply = set(), projection.multiply

    def recorded(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        strides.update(x.stride(0) for x in (a, out) if x.shape[1] == V and x.stride(1) == 1)
        multiply(a, b, out, accumulate)

    monkeypatch.setattr(projection, "multiply", recorded)
    out, d_ours = run_linear(fused_linear_gac_loss, batch, chunk_bytes=26 * V)
    assert strides == {128}
    assert torch.equal(out.loss, expected.loss)
    assert all(torch.equal(x, y) for x, y in zip(d_ours, d_expected, strict=True))
    buffer = projection.Buffer(V, torch.float32, torch.device("cpu"))
    sizes = {len(projection.Buffer.rows(buffer, n, 4000)._base) for n in (1, 1000, 1025, 3000)}
    assert sizes == {1024, 2048, 3072}
    assert (
        len(projection.Buffer(V, torch.float32, torch.device("cpu")).rows(2304, 2304)._base) == 2304
    )


def test_chunks_fill_whole_waves_of_a_gpu() -> None:
    """The hidden gradient's GEMM has a tile of 128 x 256 per multiprocessor and wave."""
    assert projection.whole_waves(2944, 1536, 132) == 2816  # 22 x 6 tiles: one full wave
    # the most and the fewest rows it may choose
    assert [projection.whole_waves(*x) for x in ((2304, 3584, 132), (512, 256, 3))] == [2304, 384]
    for rows, width in ((8192, 3584), (5000 // 128 * 128, 4096), (128, 64)):
        best = projection.whole_waves(rows, width, 132)
        assert best % 128 == 0
        assert rows * 3 // 4 <= best <= rows


def test_a_vocabulary_shard_needs_no_copy_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only [M] vectors, whose values the ranks gather, stand beside a block of logits."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(
        torch.distributed, "all_gather", lambda ranks, own, group: ranks[0].copy_(own)
    )
    native, batch = (
        backends.load(require_backend("native"), torch.device("cpu")),
        build(BY_NAME["wide"]),
    )
    tokens = native.plan(BatchInputs(*batch.inputs), LossSpec())
    logits = batch.logits().detach()
    expected = native.row_loss(logits, tokens, LossSpec(), torch.empty_like(logits))
    with PeakMemory() as memory:
        shard = shards.ShardedRows(0, logits.shape[-1], None, native)
        torch.testing.assert_close(shard.row_loss(logits, tokens, LossSpec(), logits), expected)
    assert memory.peak < logits.nbytes / 20


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error")])
def test_only_a_missing_gemm_falls_back_to_float32(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once cached, a fallback after another error would slow all later calls down.

    The operands are on the weight's device, which may not be the current one.
    """
    cpu, meta = torch.device("cpu"), torch.device("meta")
    probe = projection.has_float32_output.__wrapped__
    with pytest.warns(RuntimeWarning, match="no GEMM with torch.bfloat16 operands"):
        assert not probe(cpu, torch.bfloat16)

    def fails(*operands: Tensor) -> None:
        assert {x.device for x in operands} == {meta}
        raise error

    monkeypatch.setattr(projection, "multiply", fails)
    with pytest.raises(type(error), match=str(error)):
        probe(meta, torch.bfloat16)
