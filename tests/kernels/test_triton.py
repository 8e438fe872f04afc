"""The Triton kernels against the float64 reference, on a GPU or interpreted on the CPU."""

from __future__ import annotations

import ast
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gac_kernels import LossSpec, fused_gac_loss, token_logprobs
from gac_kernels.backends import triton as backend
from gac_kernels.backends.triton import launch
from gac_kernels.inputs import BatchInputs
from gac_kernels.tokens import plan as reference_plan
from tests.kernels.triton_cases import (
    DEVICE,
    PER_TOKEN,
    check,
    make_batch,
)

pytestmark = [
    pytest.mark.skipif(
        backend.unavailable(torch.device(DEVICE), torch.float32) is not None,
        reason="Triton is unavailable here: no GPU and no interpreter",
    ),
    # Some cases test arithmetic on inf and nan, which triggers warnings in the interpreter's NumPy.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
def test_softcap(softcap: float, dtype: torch.dtype, small_tiles: None, poison: None) -> None:
    """From strongly capped, with a tied maximum, to nearly linear; -inf still masks."""
    batch = make_batch(dtype=dtype)
    logits = batch["logits"]
    logits[0, 0, :200], logits[1, 0, 130:] = -torch.inf, -torch.inf
    logits[2, 0, 5] = logits[2, 1, 7] = 1e30
    batch["targets"][1, 0], batch["targets"][0, 0] = 3, 250
    check(batch, spec=LossSpec(entropy_coef=0.1, temperature=0.8), softcap=softcap, logit_scale=2.0)


def test_packed_vectors_with_a_stride(small_tiles: None) -> None:
    """The vectors have stride 2, but the kernels assume contiguous ones."""
    batch = make_batch()
    for name in PER_TOKEN:
        batch[name] = batch[name].flatten(0, 1)
    for name in PER_TOKEN[1:]:
        batch[name] = torch.stack([batch[name], torch.zeros_like(batch[name])], 1)[:, 0]
    batch["cu_seqlens"] = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=DEVICE)
    check(batch, spec=LossSpec(kl_coef=0.1))


@pytest.mark.parametrize("vocab", [7, 128, 256, 301], ids=["no tile", "one", "two", "and a tail"])
def test_gradient_in_a_narrower_dtype(vocab: int, small_tiles: None, poison: None) -> None:
    """The fused linear loss keeps float32 logits, but its GEMMs need a narrower gradient."""
    batch = make_batch(vocab=vocab)
    logits, targets = batch["logits"], batch["targets"].flatten()
    wide = torch.full((3, 2, vocab + 5), 7.0, dtype=torch.bfloat16, device=DEVICE)
    _, entropy, lse = backend.row_stats(logits, targets, 0.8)
    d_logps, d_entropy = torch.randn(2, 6, device=DEVICE)
    arguments = (targets, lse, entropy, d_logps, d_entropy, 0.8)
    expected = torch.empty_like(logits)
    backend.row_grads(logits, *arguments, expected)
    backend.row_grads(logits, *arguments, wide[..., :vocab])
    exact = expected.double()
    rounding = 2**-8 if DEVICE == "cuda" else 2**-7  # the interpreter truncates
    torch.testing.assert_close(wide[..., :vocab].double(), exact, rtol=rounding, atol=1e-30)
    assert (wide[..., vocab:] == 7).all()


def test_masked_vocabulary(small_tiles: None) -> None:
    """Full tiles of -inf before, between and after the finite logits; 0 log 0 counts as 0 in the
    entropy.
    """
    batch = make_batch()
    vocab_indices = torch.arange(301, device=DEVICE)
    masked = (
        (vocab_indices < 140)
        | ((vocab_indices >= 150) & (vocab_indices < 290))
        | (vocab_indices == 300)
    )
    batch["logits"] = batch["logits"].masked_fill(masked, -torch.inf)
    batch["targets"] = torch.where(batch["targets"] < 0, -100, 145)
    check(batch, spec=LossSpec(entropy_coef=0.1), ref_logps=None)


@pytest.mark.skipif(DEVICE == "cuda", reason="maps host memory")
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
    transposed = torch.randn(2, 3, 4, device=DEVICE).to(dtype).transpose(1, 2)
    for tensor in (flat, wide[:, ::2, 3:17], columns.t(), transposed, flat[:0]):
        expected = (tensor.float() * 0.3).to(dtype)
        before = wide.clone()
        backend.scale_(tensor, torch.tensor(0.3, device=DEVICE))
        exact = DEVICE == "cuda" or dtype == torch.float32  # the interpreter truncates bfloat16
        torch.testing.assert_close(tensor, expected, rtol=0 if exact else 2**-7, atol=0)
        if tensor.dim() == 3:
            assert torch.equal(wide[:, 1], before[:, 1])


def test_scaling_by_one_writes_nothing() -> None:
    """The tensor is in read-only memory, where a store would crash, so the test runs in its own
    process.
    """
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
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, timeout=120)
    assert result.stdout.strip() == b"0.0", result.stderr.decode()


def test_cpu_inputs_are_copied_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking copy would stall the host until the device catches up."""
    copies: list[tuple[tuple, dict]] = []
    to = Tensor.to

    def record_copies(x: Tensor, *args, **keywords):
        if any(isinstance(a, torch.device) for a in (*args, *keywords.values())):
            copies.append((args, keywords))
        return to(x, *args, **keywords)

    inputs = BatchInputs(
        torch.tensor([1, 2, -100, 3], device=DEVICE),
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


def test_unavailable_says_why() -> None:
    reason = backend.unavailable(torch.device(DEVICE), torch.float64)
    assert reason is not None and "float64" in reason
    code = """
import torch
from gac_kernels.backends import triton
print(triton.unavailable(torch.device("cpu"), torch.float32))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    assert "TRITON_INTERPRET" in result.stdout, result.stderr


def test_gpus_below_capability_8_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "InterpretedFunction", type(None))  # kernels would be compiled
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
    batch = make_batch(vocab=301, dtype=dtype)
    rows, width, vocab = batch["logits"].shape
    monkeypatch.setattr(launch, "unaligned", lambda _: True)
    storage = torch.full((rows, width, vocab + 9), math.nan, device=DEVICE, dtype=dtype)
    storage[..., offset : offset + vocab] = batch["logits"]
    batch["logits"] = storage[..., offset : offset + vocab]
    check(batch)
    logps, _ = token_logprobs(batch["logits"], batch["targets"], backend="triton")
    expected, _ = token_logprobs(batch["logits"], batch["targets"], backend="reference")
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("gap", [0.49, -0.49, 0.2, 0.6])
def test_kl_without_cancellation(gap: float) -> None:
    """The series near 0 and the formula beyond it, both to float32 precision."""
    logits = torch.zeros(1, 1, 4, device=DEVICE)
    fields = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), torch.tensor([False])
    ref = torch.full((1, 1), gap - math.log(4), device=DEVICE)
    fields = [x.to(DEVICE) for x in fields]
    out = fused_gac_loss(logits, *fields, ref_logps=ref, backend="triton", mu=0.5)
    d = (ref - out.logps).item()
    assert out.kl.item() == pytest.approx(math.expm1(d) - d, rel=4e-7)


def test_masked_loads_name_a_value() -> None:
    """A GPU leaves other values undefined, and the interpreter reads 0; `scale_` discards them."""
    calls = [
        (path.name, {keyword.arg for keyword in node.keywords})
        for path in Path(backend.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"
    ]
    assert sum("other" in names for _, names in calls) > 10
    assert [name for name, given in calls if given & {"mask", "other"} == {"mask"}] == ["scale.py"]
