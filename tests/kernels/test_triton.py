"""What only Triton's kernels have: addresses, unaligned rows, tiles, launches, availability."""

import ast
import math
import mmap
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gac_kernels import LossSpec, fused_gac_loss, inspect, token_logprobs
from gac_kernels.backends import triton as backend
from gac_kernels.backends.triton import launch
from gac_kernels.tokens import BatchInputs, Scaling, Upstream
from gac_kernels.tokens import plan as reference_plan
from tests import ranks
from tests.kernels.cases import BY_NAME, CPU, build, loss_and_grad, require_backend

require_backend("triton")


def test_addresses_are_64_bit(small_tiles: None) -> None:
    """Rows are 2^30 elements apart in lazily allocated memory. At 2 x 2^30 elements from the start,
    a 32-bit product of row and stride overflows.
    """
    stride, vocab = 2**30, 40
    memory = mmap.mmap(-1, 2 * (2 * stride + vocab), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    far = torch.frombuffer(memory, dtype=torch.bfloat16)
    rows = torch.randn(3, vocab).bfloat16()
    targets = torch.tensor([1, 2, 3])
    ones, zeros = torch.ones(3), torch.zeros(3)
    expected = torch.empty(1, 3, vocab, dtype=torch.bfloat16)
    stats = backend.row_stats(rows[None], targets, Scaling(1.0))
    upstream = Upstream(stats[2], stats[1], ones, zeros)
    backend.row_grads(rows[None], targets, Scaling(1.0), upstream, expected)
    for shape, strides in (((1, 3, vocab), (0, stride, 1)), ((3, 1, vocab), (stride, 0, 1))):
        logits = far.as_strided(shape, strides)
        logits.copy_(rows.view(shape))
        results = backend.row_stats(logits, targets, Scaling(1.0))
        for value, exact in zip(results, stats, strict=True):
            assert torch.equal(value, exact)
        backend.row_grads(logits, targets, Scaling(1.0), upstream, logits)
        assert torch.equal(logits.view(-1, vocab), expected[0])


def test_constants_have_types_that_decide_branches() -> None:
    """The compiler accepts no float as a condition, unlike the interpreter that runs the tests."""
    for name, launched in inspect.triton_configurations():
        annotations = launched.kernel.fn.__annotations__
        constants = [x for x, kind in annotations.items() if "constexpr" in str(kind)]
        for constant in constants:
            value = launched.arguments.get(constant)
            assert value is None or type(value) in (bool, int, str), (name, constant, value)


def scale_read_only_memory(factor: float) -> float:
    tensor = torch.frombuffer(mmap.mmap(-1, 4096, prot=mmap.PROT_READ), dtype=torch.float32)
    backend.scale_(tensor, torch.tensor(factor))
    return tensor.sum().item()


@pytest.mark.dist
def test_scaling_by_one_writes_nothing() -> None:
    """The tensor is in read-only memory, where a store would end the process."""
    assert ranks.run(scale_read_only_memory, 1.0, ranks=1) == [0.0]
    with ranks.job(scale_read_only_memory, 0.5, ranks=1) as (process,):
        assert process.result() is None
        assert process.process.exitcode == -signal.SIGSEGV


def test_cpu_inputs_are_copied_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking copy would stall the host until the device catches up."""
    copies: list[tuple[tuple, dict]] = []
    to = Tensor.to

    def record_copies(x: Tensor, *args, **keywords):
        if any(isinstance(a, torch.device) for a in (*args, *keywords.values())):
            copies.append((args, keywords))
        return to(x, *args, **keywords)

    inputs = BatchInputs(
        torch.tensor([1, 2, -100, 3]),
        torch.ones(2, dtype=torch.float64),
        torch.tensor([False, True]),
        mu=torch.tensor(0.3, dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 2, 4]),
        demo_norm=torch.tensor(3),
    )
    monkeypatch.setattr(Tensor, "to", record_copies)
    for plan in (backend.plan, reference_plan):
        copies.clear()
        plan(inputs, LossSpec())
        assert len(copies) >= 6, "expected a copy of every input, on whichever device it is"
        assert all(keywords.get("non_blocking") for _, keywords in copies)


def test_unavailable_says_why_and_gpus_below_capability_8_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "float64" in str(backend.unavailable(CPU, torch.float64))
    monkeypatch.setattr(backend, "InterpretedFunction", type(None))  # kernels would be compiled
    assert "TRITON_INTERPRET" in str(backend.unavailable(CPU, torch.float32))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    for capability, reason in (((7, 5), "T4 has a compute capability below 8.0"), ((8, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert backend.unavailable(torch.device("cuda"), torch.float32) == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.version, "hip", "7.1")  # AMD numbers its GPUs differently
    assert backend.unavailable(torch.device("cuda"), torch.float32) is None


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_rows_at_any_address_are_read_in_wide_loads(
    small_tiles: None, dtype: torch.dtype, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first logits of a row, up to an aligned address, are read separately."""
    batch = build(BY_NAME["entropy"], dtype)
    logits = batch.logits()
    expected, (d_expected,) = loss_and_grad(fused_gac_loss, logits, batch, backend="reference")
    stats = token_logprobs(logits, batch.targets, backend="reference")
    storage = torch.full((6, 4, 110), math.nan, dtype=dtype)
    rows = storage[..., offset : offset + 101].copy_(logits.detach()).requires_grad_()
    monkeypatch.setattr(launch, "unaligned", lambda _: True)
    out, (grad,) = loss_and_grad(fused_gac_loss, rows, batch, backend="triton")
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, d_expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(
        token_logprobs(rows, batch.targets, backend="triton"), stats, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("shape", "offset", "unaligned"),
    [
        ((2, 3, 8192), 0, False),
        ((2, 3, 8192), 3, True),
        ((2, 3, 8193), 0, True),
        ((2, 3, 8191), 0, False),
    ],
    ids=["aligned", "another address", "odd rows", "small"],
)
def test_which_rows_are_unaligned(shape: tuple[int, ...], offset: int, unaligned: bool) -> None:
    storage = torch.empty(math.prod(shape) + offset, dtype=torch.bfloat16)
    assert launch.unaligned(storage[offset:].view(shape)) == unaligned


def test_tiles_of_the_vocabulary_sizes() -> None:
    """Larger tiles for larger rows, and smaller ones for unaligned rows, with 16 bytes per lane."""
    sizes = (1, 8191, 8192, 8193, 65520, 65536, 65552, 65537)
    tiles = [tuple(launch.tiling(size, torch.bfloat16)) for size in sizes]
    small, medium, odd, large = (128, 8, 4, 3), (512, 8, 8, 4), (256, 8, 8, 3), (1024, 8, 16, 6)
    assert tiles == [small, small, medium, odd, medium, large, large, odd]
    assert launch.tiling(65536, torch.float32) == (1024, 4, 16, 6)


def test_masked_loads_name_a_value() -> None:
    """A GPU leaves other values undefined, and the interpreter reads 0; `scale_` discards them."""
    calls = [
        (path.name, {keyword.arg for keyword in node.keywords})
        for path in Path(backend.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"
    ]
    assert sum("other" in names for _, names in calls) > 10
    assert [name for name, given in calls if given & {"mask", "other"} == {"mask"}] == ["grads.py"]
