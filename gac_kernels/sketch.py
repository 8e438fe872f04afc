"""The head sketch: each sequence's gradient of the head weight, randomly projected on both sides.

With g_n [V] the gradient of token n's logits and h_n [H] its hidden state, sequence s contributes
G_s = sum_n g_n h_n^T to the gradient of the weight. R G_s S^T = sum_n (R g_n) (S h_n)^T preserves
inner products in expectation, because E R^T R = I and E S^T S = I, and needs k sums over each row
of g. R is a count sketch (Charikar, Chen, Farach-Colton 2002): vocabulary entry v is added to
bucket v mod k with a random sign, so each lane of a kernel always adds to the same bucket. S is a
dense random sign matrix divided by sqrt(k).

Notation: N tokens, V vocabulary size, H hidden size, S sequences, M rows of a chunk, k = size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import LossSpec
from .projection import Projection, multiply
from .tokens import Tokens, has_zero_gradient

SIZES = (4, 8, 16, 32, 64)
BLOCK = 1 << 14  # tokens whose outer products are in memory at once: 32 MiB at k = 16
_MASK_32 = 0xFFFFFFFF
_VOCABULARY, _HIDDEN = range(2)  # random streams of the signs


@dataclass(frozen=True)
class HeadSketch:
    """Two random projections R [size, V] and S [size, H] of the gradient of the head's weight.

    They preserve inner products in expectation: over seeds, the mean of <R A S^T, R B S^T> is
    <A, B>.

    Raises:
        ValueError, TypeError: an invalid size or seed.

    Source:
        R is a count sketch (Charikar, Chen and Farach-Colton, 2002), S a dense sign matrix.
    """

    size: int = 16
    """Rows of each projection, a power of two from 4 to 64."""
    seed: int = 0
    """Seed of the projections."""

    def __post_init__(self) -> None:
        if self.size not in SIZES or not isinstance(self.size, int):
            raise ValueError(f"size={self.size!r}: use one of {', '.join(map(str, SIZES))}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"seed={self.seed!r}: use an integer")

    def vocabulary(self, width: int) -> Tensor:
        """R as a dense float32 [size, width] matrix, for the reference and tests."""
        dense = torch.zeros(self.size, width, dtype=torch.float32, device="cpu")
        entries = torch.arange(width, device="cpu")
        dense[entries % self.size, entries] = self.signs(width, dense.device)
        return dense

    def hidden(self, width: int) -> Tensor:
        """S as a dense float32 [size, width] matrix."""
        return self.hidden_signs(width, torch.device("cpu")) * self.size**-0.5

    def signs(self, width: int, device: torch.device) -> Tensor:
        """float32 [width]: the +1 or -1 in each column of R, its only nonzero entry."""
        return _signs(width, self.seed, _VOCABULARY, device)

    def hidden_signs(self, width: int, device: torch.device) -> Tensor:
        """S without the factor 1 / sqrt(size): float32 [size, width] of +-1."""
        return _signs(self.size * width, self.seed, _HIDDEN, device).view(self.size, width)


class RowSketch(NamedTuple):
    """Buffers that a row kernel needs to sketch the gradient it writes."""

    signs: Tensor  # [V] of +-1; float32 on a CPU, int8 elsewhere
    buckets: Tensor  # [M, k], zeros: row m gets R g_m


class SketchFactors(NamedTuple):
    """Both factors of each token's sketched head gradient (an outer product); 0 without one."""

    vocabulary: Tensor  # [N, k]: R g_n
    hidden: Tensor  # [N, k]: S h_n times sqrt(k)


@functools.lru_cache(maxsize=8)
def _signs(count: int, seed: int, stream: int, device: torch.device) -> Tensor:
    """Random signs, float32 [count] of +-1: a 32-bit hash of the index, the seed and the stream.

    Computed once on the CPU, so that all devices get the same values.
    """
    key = _hash(torch.tensor([(2 * seed + stream) & _MASK_32], device="cpu"))
    bits = _hash(torch.arange(count, device="cpu") ^ key) >> 31
    return (1 - 2 * bits).to(torch.float32).to(device)


def _hash(x: Tensor) -> Tensor:
    """A 32-bit integer hash ("lowbias32", C. Wellons) of int64 values in [0, 2^32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK_32
    return x ^ (x >> 16)


def row_buckets(grad: Tensor, sketch: RowSketch) -> None:
    """Write R g to sketch.buckets for each row g of grad [..., V]: the reference implementation."""
    signed = grad.flatten(0, -2).to(sketch.buckets.dtype) * sketch.signs.to(sketch.buckets.dtype)
    size = sketch.buckets.shape[1]
    signed = torch.nn.functional.pad(signed, (0, -signed.shape[1] % size))
    sketch.buckets.copy_(signed.unflatten(1, (-1, size)).sum(1))


class Sketcher:
    """Computes the sketch factors of `tokens` tokens, block by block, into `factors`."""

    def __init__(self, sketch: HeadSketch, head: Projection, tokens: int) -> None:
        vocabulary, width = head.weight.shape
        device = head.weight.device
        signs = sketch.signs(vocabulary, device)
        # GPU row kernels are memory-bound: with one byte per sign, two rows still fit on a
        # multiprocessor
        self.signs = signs if device.type == "cpu" else signs.to(torch.int8)
        self.hidden_signs = sketch.hidden_signs(width, device).to(head.gemm_dtype).T
        shape = (2, tokens, sketch.size)
        self.factors = SketchFactors(*torch.zeros(shape, dtype=head.accum_dtype, device=device))

    def rows(self, index: Tensor) -> RowSketch:
        """Allocate the buffers of a row kernel call on the tokens at `index` [M]."""
        factor = self.factors.vocabulary
        return RowSketch(self.signs, factor.new_zeros(len(index), factor.shape[1]))

    def store(self, index: Tensor, rows: RowSketch) -> None:
        """Store R g of the tokens at `index` [M]."""
        self.factors.vocabulary.index_copy_(0, index, rows.buckets)

    def project(self, index: Tensor, rows: Tensor) -> None:
        """Compute sqrt(k) S h of the tokens at `index` from their hidden rows h [M, H]."""
        factor = self.factors.hidden
        projected = factor.new_empty(len(index), factor.shape[1])
        multiply(rows, self.hidden_signs, projected)
        factor.index_copy_(0, index, projected)


def per_sequence(
    factors: SketchFactors, tokens: Tokens, spec: LossSpec, inv_scale: Tensor | None
) -> Tensor:
    """Sketch the gradient G_s of each sequence: R G_s S^T, [S, k, k].

    G_s is the gradient of the sequence's contribution to its own term of the loss. The weight of
    the term, mu or 1 - mu, is divided out. The sketch is nan if that weight is 0, because the
    kernels then skip the rows.

    Args:
        factors: computed from the gradients of sum(tokens.scale * loss).
        tokens: `scale` may be divided by `inv_scale` (see `scale_for_float16`).
    """
    size = factors.vocabulary.shape[1]
    hidden = factors.hidden * size**-0.5
    mu = torch.as_tensor(tokens.mu, dtype=torch.float64, device=hidden.device)
    term_weight = torch.where(tokens.demo, mu, 1 - mu)
    no_gradient = has_zero_gradient(tokens._replace(scale=tokens.weight), spec)
    skipped = torch.where(no_gradient, 0.0, torch.nan)
    factor = (1 if inv_scale is None else inv_scale) / term_weight
    factor = torch.where(term_weight == 0, skipped, factor)
    sums = _outer_sums(factors.vocabulary * factor[:, None], hidden, tokens.offsets)
    return sums.view(-1, size, size).to(factors.vocabulary.dtype)


def _outer_sums(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Sum a_n b_n^T over each sequence in a fixed order: float64 [S, k k]."""
    shape = len(offsets) - 1, a.shape[1] * b.shape[1]
    total = torch.zeros(shape, dtype=torch.float64, device=a.device)
    for start in range(0, len(a), BLOCK):
        stop = min(start + BLOCK, len(a))
        outer = a[start:stop, :, None].double() * b[start:stop, None, :].double()
        local_offsets = offsets.clamp(start, stop) - start
        outer = outer.flatten(1)
        total += torch.segment_reduce(outer, "sum", offsets=local_offsets, axis=0, initial=0)
    return total
