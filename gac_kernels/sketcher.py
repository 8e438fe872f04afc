"""Collects both sides of the head sketch while the linear form walks through its chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from .projection import Projection, multiply
from .sketch import HeadSketch, RowSketch, Sides


class Sketcher:
    """`sides` of `tokens` tokens, filled a block at a time."""

    def __init__(self, sketch: HeadSketch, head: Projection, tokens: int) -> None:
        vocabulary, width = head.weight.shape
        signs = sketch.signs(vocabulary, head.weight.device)
        # a GPU waits for memory: a byte a word keeps two rows on a multiprocessor
        self.signs = signs if head.weight.device.type == "cpu" else signs.to(torch.int8)
        self.hidden_signs = sketch.hidden_signs(width, head.weight.device).to(head.product).T
        shape = (2, tokens, sketch.size)
        self.sides = Sides(*torch.zeros(shape, dtype=head.exact, device=head.weight.device))

    def rows(self, count: int) -> RowSketch:
        """What the row kernel of `count` tokens fills."""
        side = self.sides.vocabulary
        return RowSketch(self.signs, side.new_zeros(count, side.shape[1]))

    def keep(self, index: Tensor, rows: RowSketch) -> None:
        """R g of the tokens at `index` [M]."""
        self.sides.vocabulary.index_copy_(0, index, rows.buckets)

    def project(self, index: Tensor, rows: Tensor) -> None:
        """S h of the tokens at `index`, without its factor, from their hidden rows [M, H]."""
        side = self.sides.hidden
        found = side.new_empty(len(index), side.shape[1])
        multiply(rows, self.hidden_signs, found)
        side.index_copy_(0, index, found)
