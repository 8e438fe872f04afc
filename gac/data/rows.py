"""From token lists to the tensors of one forward pass.

Legend: B rows, T the longest row. A row is a prompt and its response; only response tokens have a
loss. Rows are padded on the right, so position t of the targets is the token after input t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gac.pair import Pair
from gac_kernels import LossSpec

from .examples import Example


class Row(NamedTuple):
    """One completion to learn from."""

    ids: tuple[int, ...]  # prompt and response
    start: int  # index in ids of the first token that has a loss
    is_demo: bool
    advantage: float = 0.0
    sequence: int = -1  # its number among the step's sequences, to find its log-probs again
    weight: float = 1.0  # factor of the row's loss, > 0
    switch: int = -1  # a rollout's tokens before this index, from start on, are a demonstration's
    unit: int = -1  # rollouts of one unit depend on each other, as a prompt's do; -1: on no other

    @property
    def response_tokens(self) -> int:
        return len(self.ids) - self.start

    @property
    def demo_tokens(self) -> int:
        """Tokens with a loss that belong to a demonstration."""
        if self.is_demo:
            return self.response_tokens
        return max(self.switch - self.start, 0)

    @property
    def kind(self) -> tuple[bool, bool, float]:
        """Rows of one kind may share a micro-batch: demonstration or not, mixed or not, weight."""
        return self.is_demo, not self.is_demo and self.demo_tokens > 0, self.weight


class Batch(NamedTuple):
    """The tensors of one forward pass. Rows that are half demonstration are two sequences each."""

    input_ids: Tensor  # int64 [B, T]
    attention_mask: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, T]: the next token where it belongs to the response, else -100
    advantages: Tensor  # float32 [B] (mixed: [2 B]), on the CPU
    is_demo: Tensor  # bool [B] (mixed: [2 B]), on the CPU
    cu_seqlens: Tensor | None = None  # int32 [2 B + 1] over the B T tokens, for mixed rows


def collate(rows: Sequence[Row], pad_token: int, device: torch.device | str = "cpu") -> Batch:
    """Pad `rows` into a batch; no rows give a batch of one token without loss."""
    width = max((len(row.ids) for row in rows), default=1)
    count = max(len(rows), 1)
    padded = [list(row.ids) + [pad_token] * (width - len(row.ids)) for row in rows]
    ids = torch.tensor(padded or [[pad_token]])
    lengths = torch.tensor([[len(row.ids)] for row in rows] or [[1]])
    # the first token of all has nothing to predict it
    starts = torch.tensor([[max(row.start, 1)] for row in rows] or [[1]])
    place = torch.arange(width)
    mask = (place < lengths).long()
    scored = (place >= starts - 1) & (place < lengths - 1)
    targets = torch.where(scored, ids.roll(-1, 1), -100)
    advantages = torch.tensor([row.advantage for row in rows] or [0.0])
    is_demo = torch.tensor([row.is_demo for row in rows] or [False])
    bounds = None
    if any(row.kind[1] for row in rows):
        # position t predicts token t + 1, so the demonstration's part ends one place early
        cuts = [(b * width, b * width + max(row.switch, 1) - 1) for b, row in enumerate(rows)]
        bounds = torch.tensor([*sum(cuts, ()), count * width], dtype=torch.int32).to(device)
        advantages = advantages.repeat_interleave(2)
        is_demo = torch.tensor([True, False]).repeat(count)
    return Batch(ids.to(device), mask.to(device), targets.to(device), advantages, is_demo, bounds)


def split(rows: Sequence[Row], size: int | None, unit: int = 1) -> Iterator[Sequence[Row]]:
    """Micro-batches of at most `size` rows, in order; None = one. `unit` rows stay together."""
    size = max(size // unit, 1) * unit if size else max(len(rows), 1)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


class Counts(NamedTuple):
    """How much there is of everything that a term may be divided by."""

    rollouts: float
    rollout_tokens: float  # with a loss
    demos: float
    demo_tokens: float  # with a loss
    rows: float  # with a loss; one that is half demonstration counts once
    tokens: float  # all that pass through the model, prompts too


def count(rows: Sequence[Row]) -> Counts:
    """The counts of this rank's rows; those of all ranks are their sum."""
    shown = [row.demo_tokens for row in rows]
    own = [row.response_tokens - tokens for row, tokens in zip(rows, shown, strict=True)]
    return Counts(
        sum(n > 0 for n in own), sum(own), sum(n > 0 for n in shown), sum(shown),
        sum(row.response_tokens > 0 for row in rows), sum(len(row.ids) for row in rows),
    )  # fmt: skip


def norms(counts: Counts, spec: LossSpec, pooled: bool = False) -> Pair:
    """The divisors of the two terms from global counts; pooled: one count over all rows."""
    rows = Pair(counts.demos, counts.rollouts)
    tokens = Pair(counts.demo_tokens, counts.rollout_tokens)
    if pooled:
        rows, tokens = Pair(counts.rows, counts.rows), Pair(sum(tokens), sum(tokens))
    of_demos = tokens if spec.demo_reduction == "token" else rows
    of_rollouts = tokens if spec.rollout_reduction == "token" else rows
    return Pair(of_demos.demo, of_rollouts.rollout)


def demo_row(example: Example, tokens: int | None = None) -> Row:
    """An example's demonstration, of which the last `tokens` have a loss; None: all."""
    demo = example.demo or ()
    learnt = len(demo) if tokens is None else min(tokens, len(demo))
    ids = example.prompt + demo
    return Row(ids, len(ids) - learnt, True, 1.0)
