"""What only Triton's kernels have: addresses, unaligned rows, tiles, launches, availability."""

import ast
import math
import mmap
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gac_kernels import LossSpec, fused_gac_loss, inspect, reference, token_logprobs
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
    monkeypatch.setattr(launch, "peels", lambda _: True)
    out, (grad,) = loss_and_grad(fused_gac_loss, rows, batch, backend="triton")
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, d_expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(
        token_logprobs(rows, batch.targets, backend="triton"), stats, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("shape", "distance", "offset", "peels"),
    [
        ((2, 3, 8192), 8192, 0, False),
        ((2, 3, 8192), 8192, 3, True),
        ((2, 3, 8193), 8193, 0, True),
        ((2, 3, 8193), 8208, 0, False),
        ((2, 3, 8193), 8208, 1, True),
        ((2, 3, 8200), 8200, 0, True),
        ((2, 3, 8191), 8191, 0, False),
    ],
    ids=["aligned", "another address", "odd", "head", "shifted", "half a multiple", "small"],
)
def test_which_rows_are_unaligned(
    shape: tuple[int, int, int], distance: int, offset: int, peels: bool
) -> None:
    """The compiler is told only of multiples of 16 elements."""
    storage = torch.empty(6 * distance + offset, dtype=torch.bfloat16)[offset:]
    assert launch.peels(storage.view(2, 3, distance)[..., : shape[-1]]) == peels


def test_the_distance_of_a_single_batch_does_not_count() -> None:
    """The kernels do not get it."""
    rows = torch.empty(65536, dtype=torch.bfloat16)
    assert launch.aligned(rows.as_strided((1, 2, 9000), (18001, 9008, 1)))
    assert not launch.aligned(rows.as_strided((2, 2, 9000), (18001, 9008, 1)))


def test_tiles_of_the_vocabulary_sizes() -> None:
    """Larger tiles for larger rows, and smaller ones for unaligned rows, with 16 bytes per lane."""

    def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(1, 2, width, dtype=dtype)

    sizes = (1, 8191, 8192, 8193, 8200, 65520, 65536, 65552, 65537)
    tiles = [tuple(launch.tiling(rows(size))) for size in sizes]
    small, medium, odd, large = (128, 8, 4, 3), (512, 8, 8, 4), (256, 8, 8, 3), (1024, 8, 16, 6)
    assert tiles == [small, small, medium, odd, odd, medium, large, large, odd]
    assert launch.tiling(rows(65536, torch.float32)) == (1024, 4, 16, 6)


def test_rows_of_a_head_have_the_tiles_of_aligned_rows_for_any_vocabulary() -> None:
    logits = torch.empty(1, 2, 65600)
    out = logits.bfloat16()
    wide, usual = (1024, 4, 16, 6), (256, 4, 8, 3)
    assert launch.tiling(logits[..., :65537]) == wide
    assert launch.tiling(logits[..., :65537], out[..., :65537]) == wide
    assert launch.tiling(logits[..., 1:65538], out[..., :65537]) == usual
    assert launch.tiling(logits[..., :65537], out[..., 1:65538]) == usual
    assert launch.tiling(logits[..., :65537], torch.empty(1, 2, 65537)) == usual


def in_wider_rows(values: Tensor, distance: int, gap: float) -> Tensor:
    """A copy of [B, T, V] whose rows are `distance` elements apart, with `gap` between them."""
    storage = values.new_full((*values.shape[:2], distance), gap)
    return storage[..., : values.shape[-1]].copy_(values)


@pytest.mark.parametrize(
    ("vocab", "distance"), [(8195, 8208), (65541, 65600)], ids=["medium tile", "large tile"]
)
@pytest.mark.parametrize("in_place", [True, False])
def test_aligned_rows_of_an_odd_length(vocab: int, distance: int, in_place: bool) -> None:
    """As in a head's buffers, whose elements between the rows are neither read nor written."""
    draw = torch.Generator().manual_seed(vocab)
    dtype = torch.bfloat16 if in_place else torch.float32
    values = 3 * torch.randn(1, 4, vocab, generator=draw)
    values[..., -3:] += 9.0  # the last tile has most of a row's sums
    values = values.to(dtype)
    targets, scaling = torch.tensor([vocab - 1, 0, -100, 5]), Scaling(0.8)
    spec = LossSpec(temperature=0.8, entropy_coef=0.1)
    tokens = reference_plan(
        BatchInputs(targets[None], torch.tensor([1.5]), torch.tensor([False])), spec
    )
    derivatives = torch.randn(2, 4, generator=draw)

    def results(kernels: Any, logits: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What the three row functions return, and the gradients that two of them write."""
        stats = kernels.row_stats(logits, targets, scaling)
        more = kernels.row_stats(logits, targets, scaling, more_outputs=True)
        upstream = Upstream(stats[2], stats[1], *derivatives.to(stats[2].dtype))
        kind = torch.float64 if kernels is reference else torch.bfloat16
        grads = [in_wider_rows(logits.to(kind), distance, 7.0) for _ in range(2)]
        rows = grads if logits.dtype == kind else [logits, logits]
        kernels.row_grads(rows[0], targets, scaling, upstream, grads[0])
        terms = kernels.row_loss(rows[1], tokens, spec, grads[1])
        return [*stats, *more, *terms], grads

    logits = in_wider_rows(values, distance, math.nan)
    assert launch.tiling(logits).lanes > 256
    found, grads = results(backend, logits)
    expected, exact = results(reference, values.double())
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-5)
    for x, y in zip(grads, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2**-8 + 1e-4, atol=1e-6)
        between = x.as_strided((4, distance), (distance, 1))[:, vocab:]
        assert (between == 7.0).all()


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
