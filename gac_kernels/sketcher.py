"""Collects the factors of the head sketch while the linear form processes its chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from .projection import Projection, multiply
from .sketch import HeadSketch, RowSketch, SketchFactors


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

    def new_rows(self, count: int) -> RowSketch:
        """Allocate the buffers of a row kernel call on `count` tokens."""
        factor = self.factors.vocabulary
        return RowSketch(self.signs, factor.new_zeros(count, factor.shape[1]))

    def store(self, index: Tensor, rows: RowSketch) -> None:
        """Store R g of the tokens at `index` [M]."""
        self.factors.vocabulary.index_copy_(0, index, rows.buckets)

    def project(self, index: Tensor, rows: Tensor) -> None:
        """Compute sqrt(k) S h of the tokens at `index` from their hidden rows h [M, H]."""
        factor = self.factors.hidden
        projected = factor.new_empty(len(index), factor.shape[1])
        multiply(rows, self.hidden_signs, projected)
        factor.index_copy_(0, index, projected)
