"""Collects both factors of the head sketch while the linear form processes its chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from .projection import Projection, multiply
from .sketch import HeadSketch, RowSketch, Sides


class Sketcher:
    """The sketch factors `sides` of `tokens` tokens, filled block by block."""

    def __init__(self, sketch: HeadSketch, head: Projection, tokens: int) -> None:
        vocabulary, width = head.weight.shape
        signs = sketch.signs(vocabulary, head.weight.device)
        # GPU row kernels are memory-bound: with one byte per sign, two rows still fit on a
        # multiprocessor
        self.signs = signs if head.weight.device.type == "cpu" else signs.to(torch.int8)
        self.hidden_signs = sketch.hidden_signs(width, head.weight.device).to(head.product).T
        shape = (2, tokens, sketch.size)
        self.sides = Sides(*torch.zeros(shape, dtype=head.exact, device=head.weight.device))

    def rows(self, count: int) -> RowSketch:
        """Empty buckets for a row kernel call on `count` tokens."""
        side = self.sides.vocabulary
        return RowSketch(self.signs, side.new_zeros(count, side.shape[1]))

    def keep(self, index: Tensor, rows: RowSketch) -> None:
        """Store R g of the tokens at `index` [M]."""
        self.sides.vocabulary.index_copy_(0, index, rows.buckets)

    def project(self, index: Tensor, rows: Tensor) -> None:
        """Compute S h of the tokens at `index`, up to the factor 1 / sqrt(k), from their hidden
        rows [M, H].
        """
        side = self.sides.hidden
        found = side.new_empty(len(index), side.shape[1])
        multiply(rows, self.hidden_signs, found)
        side.index_copy_(0, index, found)
