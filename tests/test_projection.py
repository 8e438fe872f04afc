"""The LM head's GEMMs: row chunking, memory, output precision, and launch order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gac_kernels import fused_linear_gac_loss, linear, linear_token_logprobs, projection, reference
from gac_kernels.projection import GemmOptions, Projection, spans

from .cases import BY_NAME, Batch, available, build, check_grads, check_outputs
from .emulated_gemm import Gemm, emulate
from .test_linear_memory import Live

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
V, H = 101, 24


def run(call, batch: Batch, **keywords):
    leaves = batch.hidden, batch.weight, batch.bias
    out = call(
        *(batch.hidden, batch.weight, batch.targets, batch.advantages, batch.is_demo),
        **{"bias": batch.bias, **batch.keywords, **keywords},
    )
    return out, torch.autograd.grad(out.loss * 4, leaves)


@HALF
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_half_operands(
    backend: str, dtype: torch.dtype, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are computed in float32 block by block; their gradient is rounded into a buffer for
    the whole chunk.
    """
    log = emulate(monkeypatch, dtype)
    batch = build(BY_NAME["k2"], dtype)
    truth, d_truth = run(reference.fused_linear_gac_loss, batch.to(torch.float64))
    same, d_same = run(reference.fused_linear_gac_loss, batch)
    # room for 2 rows of float32 logits and 9 rows of gradients: several chunks of several blocks
    out, d_ours = run(
        fused_linear_gac_loss, batch, backend=available(backend), chunk_bytes=(2 * 4 + 9 * 2) * V
    )
    assert {shape[0] for shape, _, _ in log if shape[1:] == (H, V)} == {1, 2}
    assert max(shape[1] for shape, _, _ in log if shape[0] == V) > 2
    check_outputs(out, same, truth)
    # as in any half-precision backward, the gradient of the logits is rounded once for its GEMMs
    check_grads(["hidden", "weight", "bias"], d_ours, d_same, d_truth, torch.finfo(dtype).eps)


@HALF
def test_half_operands_of_the_logprobs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = build(BY_NAME["entropy"], dtype)

    def grads(call, x: Batch, **keywords) -> tuple[Tensor, ...]:
        logps, entropy = call(x.hidden, x.weight, x.targets, bias=x.bias, **keywords)
        loss = (2 * logps - entropy.square()).mean()
        return torch.autograd.grad(loss, (x.hidden, x.weight, x.bias))

    truth = grads(reference.linear_token_logprobs, batch.to(torch.float64))
    same = grads(reference.linear_token_logprobs, batch)
    emulate(monkeypatch, dtype)
    ours = grads(linear_token_logprobs, batch, chunk_bytes=26 * V)
    check_grads(["hidden", "weight", "bias"], ours, same, truth, torch.finfo(dtype).eps)


class HalfProducts(TorchDispatchMode):
    """Counts the half-precision matrix products that PyTorch itself executes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm"):
            self.count += args[-1].dtype in (torch.bfloat16, torch.float16)
        return func(*args, **(kwargs or {}))


def test_every_sum_of_several_parts_is_written_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of hidden sums over the vocabulary; a GEMM with bfloat16 output may also keep
    its partial sums in bfloat16.
    """
    log = emulate(monkeypatch, torch.bfloat16)
    with HalfProducts() as made:
        run(fused_linear_gac_loss, build(BY_NAME["k2"], torch.bfloat16), chunk_bytes=26 * V)
    assert made.count == 0
    assert {(V, H), (H, V)} <= {shape[1:] for shape, _, _ in log}
    assert {out for _, out, _ in log} == {torch.float32}


def weight_gemms(log: list[Gemm]) -> list[Gemm]:
    return [gemm for gemm in log if gemm.shape[0] == V and gemm.shape[2] == H]


def test_one_sum_is_rounded_by_its_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single chunk needs no float32 weight gradient. Several chunks, a small weight or float16
    do.
    """
    batch = build(BY_NAME["k2"], torch.bfloat16)
    log = emulate(monkeypatch, torch.bfloat16)
    apart, d_apart = run(fused_linear_gac_loss, batch)
    assert [gemm.out for gemm in weight_gemms(log)] == [torch.float32]
    monkeypatch.setattr(linear, "NO_SPLIT_K", 0)
    log.clear()
    once, d_once = run(fused_linear_gac_loss, batch)
    assert [gemm[1:] for gemm in weight_gemms(log)] == [(torch.bfloat16, False)]
    assert torch.equal(once.loss, apart.loss)
    assert all(torch.equal(x, y) for x, y in zip(d_once, d_apart, strict=True))
    log.clear()
    run(fused_linear_gac_loss, batch, chunk_bytes=26 * V)
    assert len(weight_gemms(log)) > 1
    assert {gemm.out for gemm in weight_gemms(log)} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):  # a float32 weight's gradient is never rounded
        log.clear()
        grads = run(fused_linear_gac_loss, batch.to(torch.float32))[1]
    assert [gemm.out for gemm in weight_gemms(log)] == [torch.float32]
    assert grads[1].dtype == torch.float32
    log = emulate(
        monkeypatch, torch.float16
    )  # float16 gradients still need a factor, which is applied in float32
    run(fused_linear_gac_loss, build(BY_NAME["k2"], torch.float16))
    assert [gemm.out for gemm in weight_gemms(log)] == [torch.float32]


def head(
    words: int, hidden: int = 8, dtype: torch.dtype = torch.float32, chunk_bytes: int | None = None
) -> Projection:
    weight = torch.empty(words, hidden, dtype=dtype, device="meta")
    return Projection(weight, None, GemmOptions(dtype, chunk_bytes))


def test_without_rounding_a_chunk_is_one_block() -> None:
    assert (
        head(1000, chunk_bytes=1_100_000).block == 256
    )  # 275 rows fit; rounded down to whole GEMM tiles
    assert head(1000, chunk_bytes=1_100_000).chunk == 256
    assert head(1000, chunk_bytes=1).chunk == 1


@pytest.mark.parametrize(("words", "wide"), [(152064, 3584), (151936, 1536), (32000, 4096)])
def test_rows_on_a_gpu(words: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Qwen's heads, the logits GEMM fills exactly 18 waves on 132 multiprocessors, and the
    backward's GEMMs get 2304 rows. Every head stays below 1 GiB, including the rows of hidden and
    their gradient.
    """
    emulate(monkeypatch, torch.bfloat16)
    large = head(words, wide, torch.bfloat16)
    if words > 150_000:
        assert (large.block, large.chunk) == (512, 2304)
    both = 4 * large.block * words + 2 * large.chunk * (words + 2 * wide)
    assert 0.95 * projection.CHUNK_BYTES["cuda"] < both <= projection.CHUNK_BYTES["cuda"] < 2**30
    assert (
        large.block * words > large.chunk * wide
    )  # the logits block has room for hidden's gradient in float32
    small = head(words, 8, torch.bfloat16, chunk_bytes=1)
    assert (small.block, small.chunk) == (1, 1)


def test_ranks_with_unequal_shares_of_a_vocabulary_cut_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate(monkeypatch, torch.bfloat16)
    options = GemmOptions(torch.bfloat16, None, vocab_size=76033)
    shares = [torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (76033, 75000)]
    cuts = {(p.chunk, p.block) for p in (Projection(x, None, options) for x in shares)}
    assert len(cuts) == 1


def test_equal_pieces_of_whole_tiles() -> None:
    assert [*spans(10, 530, 256)] == [slice(10, 266), slice(266, 522), slice(522, 530)]
    assert [*spans(10, 10, 256)] == []
    sizes = [span.stop - span.start for span in spans(0, 8192, 1536)]
    assert sizes == [1408, 1408, 1408, 1408, 1280, 1280]  # 64 tiles in six chunks
    sizes = [span.stop - span.start for span in spans(0, 2304, 512)]
    assert sizes == [512, 512, 512, 384, 384]


def test_memory_of_half_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory is one block of logits plus one chunk of gradients. The float32 product for
    hidden's gradient reuses the logits buffer.
    """
    words, wide = 4001, 64
    hidden = torch.randn(1, 130, wide, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, wide, dtype=torch.bfloat16)
    batch = torch.randint(words, (1, 130)), torch.ones(1), torch.tensor([False])
    budget = 10 * 4 * words + 45 * 2 * (words + 2 * wide)

    def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        """Multiply one row at a time, so that the emulation itself uses almost no memory."""
        for x, y in zip(a, out, strict=True):
            y.copy_((x[None] @ b)[0].float())

    emulate(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(projection, "multiply", multiply)
    with Live() as live:
        fused_linear_gac_loss(hidden, weight, *batch, chunk_bytes=budget, backend="native")
    least = (10 * 4 + 44 * 2) * words  # the longest of three chunks has 44 rows
    assert (
        least <= live.peak <= least + 110_000
    )  # margin for hidden's rows and gradient, and per-token vectors


class Launches(TorchDispatchMode):
    """Records the operators in order, and where the host waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        tolist = Tensor.tolist
        monkeypatch.setattr(
            Tensor, "tolist", lambda x: self.names.append("host waits") or tolist(x)
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_but_the_rows_is_fetched_between_the_wait_and_the_first_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the sync the device is idle, so every small launch before the GEMM adds latency."""
    batch = build(BY_NAME["k2"])
    leaves = batch.hidden, batch.weight
    inputs = batch.targets, batch.advantages, batch.is_demo
    views = {"slice", "t", "transpose", "view", "detach", "empty", "permute"}
    with Launches(monkeypatch) as launched:
        out = fused_linear_gac_loss(*leaves, *inputs, **batch.keywords)
        forward, launched.names = launched.names, []
        logps, _ = linear_token_logprobs(*leaves, batch.targets)
        stats, launched.names = launched.names, []
        logps.sum().backward()
        backward = launched.names
    assert out.loss.isfinite()
    for names in (forward, stats, backward):
        assert names.count("host waits") == 1
        wait = names.index("host waits")
        assert {"argsort", "sort"} & set(names[:wait]) and {"zeros", "new_zeros"} & set(
            names[:wait]
        )
        between = names[wait + 1 : names.index("mm", wait)]
        assert [name for name in between if name not in views] == ["index_select"]
