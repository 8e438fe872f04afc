"""The head sketch inside the CUDA row kernel, on emulated threads.

Expected values come from the definition, `row_buckets`, applied to the float64 gradient of the same
logits.
"""

import ctypes

import pytest
import torch
from torch import Tensor

from gac_kernels import HeadSketch, reference
from gac_kernels.backends import cuda
from gac_kernels.contract import LossSpec
from gac_kernels.sketch import RowSketch, row_buckets
from gac_kernels.tokens import Tokens
from tests.kernels import cuda_emulation as emulation
from tests.kernels.cases import in_float64

PLAIN, ENTROPY = LossSpec(), LossSpec(entropy_coef=0.1, temperature=1.3)


def rows_for(size: int, logits: Tensor, offset: int = 0) -> RowSketch:
    """An empty sketch of `size` buckets per row; the first sign is `offset` bytes after an aligned
    address.
    """
    vocab = logits.shape[-1]
    signs = torch.zeros(vocab + 64, dtype=torch.int8)[offset : offset + vocab]
    signs.copy_(HeadSketch(size).signs(vocab, torch.device("cpu")))
    return RowSketch(signs, torch.zeros(logits.shape[0] * logits.shape[1], size))


def check(logits: Tensor, tokens: Tokens, spec: LossSpec, rows: RowSketch, out: Tensor) -> None:
    """Compare with the buckets [M, k] of the float64 gradient of the same logits."""
    exact = torch.empty(logits.shape, dtype=torch.float64)
    reference.row_loss(logits.double(), in_float64(tokens), spec, exact)
    truth = RowSketch(rows.signs, rows.buckets.double())
    row_buckets(exact, truth)
    cuda.row_loss(logits, tokens, spec, out, rows)
    torch.testing.assert_close(
        rows.buckets.double(), truth.buckets, rtol=1e-5, atol=1e-6 * tokens.scale.abs().max().item()
    )
    masked = tokens.targets.flatten() == -100
    assert (rows.buckets[masked] == 0).all()
    assert (truth.buckets != 0).any()


# (gradient, V, blocks, tiles); the logits of the linear form are float32
SHAPES = {
    "bfloat16": (torch.bfloat16, 8192, 2, 4),
    "float16, odd": (torch.float16, 9001, 2, 4),
    "slices that start between buckets": (torch.bfloat16, 15004, 4, 3),
    "eight blocks, odd": (torch.float32, 20003, 8, 2),
    "fewer vocabulary entries than buckets": (torch.float32, 3, 2, 2),
}


@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(split_rows, name: str, size: int) -> None:
    out_dtype, vocab, blocks, tiles = SHAPES[name]
    split_rows(blocks, tiles)
    logits = 3 * torch.randn(2, 3, vocab)
    tokens = emulation.batch(logits, PLAIN)
    tokens.targets[3] = 0  # a whole number of rounds of threads before the other blocks' slices
    out = torch.full(logits.shape, torch.nan, dtype=out_dtype)
    check(logits, tokens, PLAIN, rows_for(size, logits), out)


@pytest.mark.parametrize("offset", range(4))
def test_entropy_and_signs_at_any_address(split_rows, offset: int) -> None:
    split_rows(2, 3)
    logits = torch.randn(2, 3, 5003)
    tokens = emulation.batch(logits, ENTROPY)
    check(logits, tokens, ENTROPY, rows_for(8, logits, offset), torch.empty_like(logits))


def test_rows_of_any_stride_and_steep_logits(split_rows) -> None:
    split_rows(2, 3)
    logits = torch.randn(2, 4, 6005)[:, :-1, 1:-1]
    logits[0, 0] += 6e4
    tokens = emulation.batch(logits, PLAIN)
    # aligned differently from the logits
    out = torch.zeros(2, 4, 6005, dtype=torch.bfloat16)[:, 1:, 2:]
    check(logits, tokens, PLAIN, rows_for(16, logits), out[..., : logits.shape[-1]])


def test_a_confident_target_keeps_its_precision(split_rows) -> None:
    """The target has nearly all the probability, so the gradient and its sums are tiny."""
    split_rows(2, 3)
    logits = torch.randn(2, 2, 6001)
    tokens = emulation.batch(logits, PLAIN, on_policy=True)
    logits[0, 0, tokens.targets[0]] = 25.0
    rows, out = rows_for(16, logits), torch.empty_like(logits)
    cuda.row_loss(logits, tokens, PLAIN, out, rows)
    own = RowSketch(rows.signs, rows.buckets.double())
    row_buckets(out, own)
    largest = own.buckets[0].abs().max()
    assert 0 < largest < 1e-6 * (tokens.scale * tokens.advantages)[0].abs()
    assert (rows.buckets - own.buckets)[0].abs().max() < 1e-6 * largest


def test_rows_with_zero_gradient_have_a_zero_sketch(split_rows) -> None:
    """Masked tokens, and a token whose scale is 0."""
    split_rows(2, 2)
    logits = torch.randn(2, 3, 4000)
    tokens = emulation.batch(logits, PLAIN)
    tokens = tokens._replace(scale=tokens.scale * torch.tensor([0.0, 1, 1, 1, 1, 1]))
    rows = rows_for(16, logits)
    cuda.row_loss(logits, tokens, PLAIN, torch.empty_like(logits), rows)
    live = torch.tensor([False, False, True, True, False, True])
    assert ((rows.buckets != 0).all(1) == live).all()


def test_sketching_does_not_change_other_results(kernels: ctypes.CDLL, split_rows) -> None:
    """They are bitwise identical with and without a sketch, in place, and for other schedules and
    cluster counts.
    """
    split_rows(4, 3)
    logits = torch.randn(2, 6, 8001)
    tokens = emulation.batch(logits, ENTROPY)
    plain = torch.empty_like(logits)
    terms = cuda.row_loss(logits, tokens, ENTROPY, plain)
    buckets = []
    for seed in range(4):
        kernels.gac_emulate_seed(seed)
        emulation.set_clusters(kernels, launched=1 + 2 * seed, resident=1 + seed)
        rows, in_place = rows_for(16, logits), logits.clone()
        terms_again = cuda.row_loss(in_place, tokens, ENTROPY, in_place, rows)
        assert torch.equal(in_place, plain)
        assert all(map(torch.equal, terms, terms_again))
        buckets.append(rows.buckets)
    assert all(torch.equal(buckets[0], other) for other in buckets[1:])


def test_unsupported_bucket_counts_are_rejected(split_rows) -> None:
    split_rows(2, 2)
    logits = torch.randn(2, 2, 100)
    rows = rows_for(16, logits)._replace(buckets=torch.zeros(4, 12))
    with pytest.raises(RuntimeError, match="sketch .* 4, 8, 16, 32 or 64"):
        cuda.row_loss(logits, emulation.batch(logits, PLAIN), PLAIN, logits.clone(), rows)
    narrow, rows = logits.bfloat16(), rows_for(16, logits)
    with pytest.raises(RuntimeError, match="have no sketch"):
        cuda.row_loss(narrow, emulation.batch(narrow, PLAIN), PLAIN, narrow.clone(), rows)
