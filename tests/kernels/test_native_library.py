"""The library of the native CPU backend: instruction sets, operators, and why it is unavailable."""

import dataclasses
import math
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gac_kernels import LossSpec, backends, fused_gac_loss, token_logprobs
from gac_kernels.backends import cpu
from gac_kernels.contract import TOKEN_OPTIONS
from gac_kernels.tokens import BatchInputs, Scaling, Upstream
from tests.kernels.cases import BY_NAME, CPU, HALF, build, error, require_backend

require_backend("native")
load_library = cpu.library.__wrapped__
WIDEST = torch.backends.cpu.get_cpu_capability().lower()
INSTRUCTION_SETS = ("default", "avx2", "avx512")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the backend use a new copy of the library, which selects its instruction set again."""

    def install(name: str) -> None:
        monkeypatch.setenv("GAC_CPU_CAPABILITY", name)
        monkeypatch.setattr(
            cpu, "LIBRARY", Path(shutil.copy(cpu.LIBRARY, tmp_path / f"library {name}.so"))
        )
        loaded = load_library()
        monkeypatch.setattr(cpu, "library", lambda: loaded)

    return install


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, load: Callable[[str], None]) -> str:
    if request.param not in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(WIDEST) + 1]:
        pytest.skip(f"this processor supports only {WIDEST}")
    load(request.param)
    return request.param


def test_each_instruction_set(instruction_set: str) -> None:
    assert cpu.capability() == instruction_set
    assert (torch.tensor([1e-40]) * 0.5).item() > 0, "loading it turned flush-to-zero on"
    logits = 4 * torch.randn(2, 3, 5003)
    logits[0, :, 100:3000] = -torch.inf
    targets = torch.tensor([[0, 5, 3001], [7, -100, 5002]])
    batch = targets, torch.ones(2), torch.tensor([False, True])
    for dtype in (torch.float32, *HALF):
        rows = logits.to(dtype, copy=True).requires_grad_()
        result = fused_gac_loss(rows, *batch, backend="native", mu=0.5)
        result.loss.backward()
        assert (rows.grad[0, :, 100:3000] == 0).all()
        truth = rows.detach().double().requires_grad_()
        expected = fused_gac_loss(truth, *batch, backend="reference", mu=0.5)
        expected.loss.backward()
        assert error(result.logps, expected.logps) < 2e-6
        assert error(result.entropy, expected.entropy) < 2e-6
        margin = 1e-7 if dtype == torch.float16 else 1e-8
        assert (
            (rows.grad - truth.grad).abs() <= torch.finfo(dtype).eps * truth.grad.abs() + margin
        ).all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_half_value_converts_exactly(instruction_set: str, dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    logits = torch.stack([values, torch.zeros_like(values)], 1)[None]  # [1, N, 2]
    logps, _ = token_logprobs(
        logits, torch.zeros(1, len(values), dtype=torch.int64), backend="native"
    )
    truth = torch.nn.functional.logsigmoid(values.double())
    assert ((logps[0] - truth).abs() <= 1e-6 + 1e-7 * truth.abs()).all()


def row_grads(logits: Tensor, d_logps: Tensor, d_entropy: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of rows whose target is entry 5."""
    targets = torch.full_like(d_logps, 5, dtype=torch.int64)
    upstream = Upstream(d_logps, d_logps, d_logps, d_entropy)
    cpu.row_grads(logits, targets, Scaling(1.0), upstream, out)
    return out


def test_gradients_that_bypass_the_caches_are_the_same(instruction_set: str) -> None:
    """34 MB against quarters of it. The rows begin at any alignment; after a block, three logits
    are left.
    """
    logits, ones = torch.randn(1, 4200, 2051), torch.ones(1, 1050)
    written, zeros = torch.full((logits.numel() + 16,), math.nan), 0 * ones
    out = written[:-16].view_as(logits)
    row_grads(logits, ones.repeat(1, 4), zeros.repeat(1, 4), out)
    for part, expected in zip(logits.split(1050, 1), out.split(1050, 1), strict=True):
        assert torch.equal(row_grads(part, ones, zeros, torch.empty_like(part)), expected)
    assert written[-16:].isnan().all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_gradients_are_the_rounded_float32_gradients(
    instruction_set: str, dtype: torch.dtype
) -> None:
    """From gradients that round to 0, and subnormal ones, to infinite ones and nan."""
    logits, d_logps = 4 * torch.randn(1, 64, 301), torch.logspace(-12, 40, 64).clamp(max=3e38)
    logits[0, -1, 7] = torch.nan
    for d_entropy in (torch.zeros(64), d_logps):
        exact = row_grads(logits, d_logps, d_entropy, torch.empty_like(logits)).to(dtype)
        rounded = row_grads(logits, d_logps, d_entropy, torch.empty_like(exact))
        assert dtype != torch.float16 or ((exact == 0).any() and exact.isinf().any())
        assert exact[0, -1].isnan().all()
        torch.testing.assert_close(rounded, exact, rtol=0, atol=0, equal_nan=True)


def test_large_gradient_is_equal_in_a_new_buffer_and_in_place(instruction_set: str) -> None:
    """A result of 34 MiB bypasses the caches; its rows are unaligned."""
    logits, d_logps, d_entropy = torch.zeros(1, 1000, 9001), torch.zeros(1000), torch.zeros(1000)
    logits[0, ::111], d_logps[::111], d_entropy[::222] = torch.randn(10, 9001), 0.7, -0.3
    storage = torch.full((logits.numel() + 64,), torch.nan)
    grad = row_grads(logits, d_logps, d_entropy, storage[: logits.numel()].view_as(logits))
    assert torch.equal(grad, row_grads(logits, d_logps, d_entropy, logits))
    assert (grad[0, ::111] != 0).any(1).all()
    assert storage[logits.numel() :].isnan().all()


@pytest.mark.parametrize("width", (1, 19, 301, 2049))
def test_only_the_results_are_written(
    instruction_set: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    storages: list[Tensor] = []

    def allocate(size: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor between values that must not change."""
        shape = (size,) if isinstance(size, int) else size
        storages.append(torch.full((math.prod(shape) + 32,), 1, dtype=dtype))
        return storages[-1][16:-16].view(shape)

    monkeypatch.setattr(torch, "empty_like", lambda x: allocate(x.shape, x.dtype))
    monkeypatch.setattr(Tensor, "new_empty", lambda x, n, dtype=None: allocate(n, dtype or x.dtype))
    batch = build(dataclasses.replace(BY_NAME["all options"], vocabulary=width))
    logits, targets = batch.logits().detach(), batch.targets
    targets[0, 0], targets[-1, -1] = -1, width
    columns = batch.keywords["old_logps"], batch.keywords["ref_logps"]
    inputs = BatchInputs(targets, batch.advantages, batch.is_demo, 0.4, *columns)
    tokens = cpu.plan(inputs, LossSpec())
    cpu.row_stats(logits, tokens.targets, Scaling(1.0), more_outputs=True)
    for dtype in (torch.float32, *HALF):
        out = allocate(logits.shape, dtype)
        terms = cpu.row_loss(logits, tokens, LossSpec(), out)
    cpu.reduce(tokens, terms, True)
    assert len(storages) > 20
    assert all((s[:16] == 1).all() and (s[-16:] == 1).all() for s in storages)


def test_an_instruction_set_that_is_not_supported_is_rejected(load: Callable[[str], None]) -> None:
    load("")
    assert cpu.capability() == WIDEST
    with pytest.raises(ValueError, match="GAC_CPU_CAPABILITY=sse9: .*default.*avx2.*avx512"):
        load("sse9")


def test_unavailable_says_why() -> None:
    assert "float64" in cpu.unavailable(CPU, torch.float64)
    assert "not on meta" in cpu.unavailable(torch.device("meta"), torch.float32)
    with pytest.raises(RuntimeError, match="backend='native' cannot run here: .*float64"):
        token_logprobs(torch.zeros(1, 1, 4).double(), torch.zeros(1, 1).long(), backend="native")
    with pytest.raises(RuntimeError, match="backend='native' cannot run here: .*float64"):
        fused_gac_loss(torch.zeros(1, 1, 4).double(), torch.zeros(1, 1).long(), backend="native")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("logits", [None, torch.zeros(1, 3, 4)], ids=["both", "targets"])
def test_fake_tensors_are_rejected(logits: Tensor | None) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="hold no data"):
        rows = torch.zeros(1, 3, 4) if logits is None else logits
        cpu.row_stats(rows, torch.zeros(3).long(), Scaling(1.0))


@pytest.mark.parametrize(
    ("ends", "message"),
    (([0, 2, 1], "decreases"), ([0, 2, 4], "must .* end at N"), ([1, 2, 3], "must start at 0")),
)
def test_invalid_offsets_are_not_followed(ends: list[int], message: str) -> None:
    inputs = BatchInputs(torch.zeros(3).long(), torch.zeros(2), torch.tensor([False, True]))
    with pytest.raises(RuntimeError, match=message):
        cpu.plan(inputs._replace(cu_seqlens=torch.tensor(ends)), LossSpec())


def test_missing_memory_is_reported() -> None:
    logits, one = torch.zeros(1, 1, 1).expand(1, 1, 2**60), torch.ones(1)
    with pytest.raises(RuntimeError, match="not enough memory"):
        cpu.row_stats(logits, torch.zeros(1).long(), Scaling(1.0, softcap=3.0))
    with pytest.raises(RuntimeError, match="not enough memory"):
        row_grads(logits, one, one, logits)


def test_columns_of_another_layout_are_converted() -> None:
    logits, targets = torch.randn(1, 6, 9), torch.arange(6)
    expected = cpu.row_stats(logits, targets, Scaling(1.0))
    strided = torch.stack([targets, targets], 1).int()[:, 0]
    assert all(map(torch.equal, cpu.row_stats(logits, strided, Scaling(1.0)), expected))


def test_missing_or_invalid_library_is_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)
    reason = cpu.library_error.__wrapped__
    built = cpu.LIBRARY
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "_native.so")
    assert re.search("not built.*GAC_EXT=1", reason())
    cpu.LIBRARY.write_bytes(b"not a library")
    assert re.search("failed to load.*GAC_EXT=1", reason())
    (tmp_path / "cpu").mkdir()
    for header in ("cpu/native.h", "token_math.h"):
        (tmp_path / header).write_text("// other sources")
    monkeypatch.setattr(cpu, "LIBRARY", built)
    monkeypatch.setattr(cpu.build_cuda, "SOURCES", tmp_path)
    assert re.search("failed to load.*different version of the sources.*GAC_EXT=1", reason())


def test_fallback_is_reported_once(monkeypatch) -> None:
    backends.warn_once.cache_clear()
    monkeypatch.setattr(cpu, "library_error", lambda: "the extension is not built")
    with pytest.warns(RuntimeWarning, match="native.*not built.*reference") as warned:
        token_logprobs(torch.zeros(1, 1, 4), torch.zeros(1, 1).long())
    assert warned[0].filename == __file__  # the caller's line
    assert backends.select_backend("auto", CPU, torch.float32) is backends.load("reference", CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.select_backend("auto", CPU, torch.float32)
        assert backends.select_backend("auto", CPU, torch.float64) is backends.load(
            "reference", CPU
        )


def test_the_options_of_a_token_are_those_of_the_header() -> None:
    """C++ reads them as an array, so their number and their order are part of its interface."""
    header = (cpu.build_cuda.SOURCES / "token_math.h").read_text()
    assert f"kTokenOptions = {len(TOKEN_OPTIONS)};" in header
    assert tuple(re.findall(r"spec\.(\w+) = (?:real|index|static_cast)", header)) == TOKEN_OPTIONS
