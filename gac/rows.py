"""Rows of tokens, their tensors, and the counts that divide their losses.

Notation: B rows, T the longest row, N tokens, S sequences. A row is a prompt and its completion;
only completion tokens have a loss. Rows are padded on the right, or packed end to end; either way
`targets[t]` is the token after input t.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gac.types import TermPair
from gac_kernels import LossSpec


class Row(NamedTuple):
    """One training row: a prompt and a completion."""

    ids: tuple[int, ...]  # prompt and completion
    start: int  # index in ids of the first token that has a loss
    is_demo: bool
    advantage: float = 0.0
    sequence: int = -1  # index of the row within the step, to look up its log-probs
    weight: float = 1.0  # factor of the row's loss, > 0
    switch: int = -1  # a rollout's tokens from `start` up to this index belong to a demonstration
    unit: int = -1  # id of dependent rollouts, such as those of one prompt; -1: independent
    # log-probs of the loss tokens in the engine that sampled them; nan: not sampled
    engine_logps: tuple[float, ...] = ()
    context: tuple[int, ...] = ()  # tokens that only the teacher sees, before `ids`; (): none
    source: str = ""  # the example's source, if the data name sources
    # whether each token from `start` >= 1 has a loss; (): all do. The others are only read, such as
    # tool results
    mask: tuple[bool, ...] = ()

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that have a loss."""
        return sum(self.mask) if self.mask else len(self.ids) - self.start

    @property
    def demo_tokens(self) -> int:
        """Number of demonstration tokens that have a loss."""
        if self.is_demo:
            return self.loss_tokens
        return self.switch - self.start if self.mixed else 0

    def scored(self, offset: int) -> slice | torch.Tensor:
        """Positions that predict the row's loss tokens, for a row that starts at `offset`."""
        first = offset + max(self.start, 1) - 1
        if self.mask:
            return torch.tensor(self.mask).nonzero().flatten() + first
        return slice(first, offset + len(self.ids) - 1)

    @property
    def mixed(self) -> bool:
        """Whether the loss tokens are a demonstration prefix followed by the policy's tokens."""
        return self.switch > self.start and not self.is_demo

    @property
    def kind(self) -> tuple[bool, bool, float, bool]:
        """Rows with equal kind may share a micro-batch: (is_demo, mixed, weight, has a context)."""
        return self.is_demo, self.mixed, self.weight, bool(self.context)


class Batch(NamedTuple):
    """The tensors of one forward: `[B, T]` padded, or `[1, N]` packed.

    The S sequences are the rows, or two per row in a batch of mixed rows.
    """

    model_inputs: dict[str, Any]
    """Arguments of the model's forward; if packed, the positions restart at 0 in each row."""
    targets: torch.Tensor
    """int64, shaped like the input: the next token if it has a loss, else -100."""
    advantages: torch.Tensor  # float32 [S], on the CPU
    is_demo: torch.Tensor  # bool [S], on the CPU
    starts: tuple[int, ...]  # offset of each row in the flattened tokens
    units: torch.Tensor  # int64 [S], on the CPU: `Row.unit` of each sequence
    cu_seqlens: torch.Tensor | None  # int32 [S + 1]; None if the sequences are the padded rows


def token_ids(parts: Iterable[Sequence[int]]) -> np.ndarray:
    """Concatenate `parts` into int64 [N]; seven times as fast as `torch.tensor`."""
    return np.fromiter(itertools.chain.from_iterable(parts), np.int64)


def collate(
    rows: Sequence[Row], pad_token: int, device: torch.device | str = "cpu", packed: bool = False
) -> Batch:
    """Pad or pack `rows`, of one kind, into a batch; without rows, one dummy token without loss."""
    rows = rows or (Row((pad_token,), 1, False),)
    lengths = np.array([len(row.ids) for row in rows])
    first = np.array([row.start for row in rows])  # no position predicts a row's first token
    width = int(lengths.max())
    if packed:
        starts = (0, *itertools.accumulate(lengths.tolist()))
        ids = token_ids(row.ids for row in rows)[None]
        positions = np.concatenate([np.arange(n) for n in lengths])[None]
        first, ends = (np.repeat(x, lengths)[None] for x in (first, lengths))
    else:
        starts = tuple(range(0, (len(rows) + 1) * width, width))
        padded = (row.ids + (pad_token,) * (width - len(row.ids)) for row in rows)
        ids = token_ids(padded).reshape(len(rows), width)
        positions, first, ends = np.arange(width)[None], first[:, None], lengths[:, None]
    scored = (positions >= first - 1) & (positions < ends - 1)
    for i, row in enumerate(rows):
        if row.mask:
            part = slice(starts[i] + row.start - 1, starts[i] + len(row.ids) - 1)
            scored.reshape(-1)[part] &= np.array(row.mask)
    targets = np.where(scored, np.roll(ids, -1), -100)
    advantages = torch.tensor([row.advantage for row in rows])
    is_demo = torch.tensor([row.is_demo for row in rows])
    units = torch.tensor([row.unit for row in rows])
    bounds = starts if packed else None
    if rows[0].mixed:
        # position t predicts token t + 1, so the demonstration part ends one position earlier
        parts = [(at, at + row.switch - 1) for at, row in zip(starts, rows, strict=False)]
        bounds = (*itertools.chain(*parts), starts[-1])
        advantages, units = (x.repeat_interleave(2) for x in (advantages, units))
        is_demo = torch.tensor([True, False]).repeat(len(rows))

    def to_device(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(device)

    def to_bounds(bounds: tuple[int, ...] | None) -> torch.Tensor | None:
        return None if bounds is None else to_device(np.array(bounds, np.int32))

    inputs: dict[str, Any] = {"input_ids": to_device(ids), "attention_mask": None}
    if packed:
        inputs["position_ids"] = to_device(positions)
        # flash attention would derive these from the positions in every layer
        inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), to_bounds(starts))
        inputs |= dict.fromkeys(("max_length_q", "max_length_k"), width)
    else:
        inputs["attention_mask"] = to_device((positions < ends).astype(np.int64))
    tensors = to_device(targets), advantages, is_demo
    return Batch(inputs, *tensors, starts[:-1], units, to_bounds(bounds))


def engine_logps(rows: Sequence[Row], batch: Batch) -> torch.Tensor:
    """The sampling engine's log-probs, shaped like `batch.targets`; nan where there are none."""
    if not rows:
        return torch.full_like(batch.targets, math.nan, dtype=torch.float32)
    logps = [
        # no position predicts a row's first token
        torch.tensor(row.engine_logps or [math.nan] * row.loss_tokens)[row.start == 0 :]
        for row in rows
    ]
    return scatter_logps(logps, rows, batch, math.nan)


def scatter_logps(
    logps: Sequence[torch.Tensor], rows: Sequence[Row], batch: Batch, other: float = 0.0
) -> torch.Tensor:
    """Scatter each row's log-probs [n] into a tensor shaped like `batch.targets`.

    Other values of the row's loss tokens work, too, such as K token ids of each, [n, K].

    other: value of the positions that predict no loss token.
    """
    width = logps[0].shape[1:]
    out = torch.full((batch.targets.numel(), *width), other)
    for offset, row, values in zip(batch.starts, rows, logps, strict=True):
        out[row.scored(offset)] = values
    return out.view(*batch.targets.shape, *width).to(batch.targets.device)


class Counts(NamedTuple):
    """Row and token counts by which a loss term may be divided."""

    rollouts: float
    rollout_tokens: float  # with a loss
    demos: float
    demo_tokens: float  # with a loss
    rows: float  # with a loss; a mixed row counts once
    tokens: float  # all tokens that pass through the model, including prompts


def count(rows: Sequence[Row]) -> Counts:
    """Counts of this rank's rows; sum them over ranks for the global counts."""
    demo = [row.demo_tokens for row in rows]
    rollout = [row.loss_tokens - tokens for row, tokens in zip(rows, demo, strict=True)]
    return Counts(
        rollouts=sum(n > 0 for n in rollout),
        rollout_tokens=sum(rollout),
        demos=sum(n > 0 for n in demo),
        demo_tokens=sum(demo),
        rows=sum(row.loss_tokens > 0 for row in rows),
        tokens=sum(len(row.ids) for row in rows),
    )


def loss_divisors(counts: Counts, spec: LossSpec, pooled: bool = False) -> TermPair:
    """The divisors of the two terms, from global counts; with `pooled`, both cover all rows."""
    rows = TermPair(counts.demos, counts.rollouts)
    tokens = TermPair(counts.demo_tokens, counts.rollout_tokens)
    if pooled:
        rows, tokens = TermPair(counts.rows, counts.rows), TermPair(sum(tokens), sum(tokens))
    demo_counts = tokens if spec.demo_reduction == "token" else rows
    rollout_counts = tokens if spec.rollout_reduction == "token" else rows
    return TermPair(demo_counts.demo, rollout_counts.rollout)
