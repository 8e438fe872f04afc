"""Rows of tokens: their tensors, micro-batches, and division between ranks.

Notation: B rows, T the longest row, N tokens, S sequences. A row is a prompt and its completion;
only completion tokens have a loss. Rows are padded on the right, or packed end to end; either way
`targets[t]` is the token after input t.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from gac.parallel import collectives
from gac_kernels import LossSpec

from .examples import Example


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
    context: tuple[int, ...] = ()  # tokens that only the teacher sees, before `ids`; (): no teacher
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
    def kind(self) -> tuple[bool, bool, float]:
        """Rows with equal kind may share a micro-batch: (is_demo, mixed, weight)."""
        return self.is_demo, self.mixed, self.weight


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
    """Scatter each row's log-probs into a tensor shaped like `batch.targets`.

    other: value of the positions that predict no loss token.
    """
    out = torch.full((batch.targets.numel(),), other)
    for offset, row, values in zip(batch.starts, rows, logps, strict=True):
        out[row.scored(offset)] = values
    return out.view(batch.targets.shape).to(batch.targets.device)


class TermPair(NamedTuple):
    """One value per loss term, e.g. a loss, a weight or a divisor."""

    demo: float
    """Value of the demonstration term (SFT)."""
    rollout: float
    """Value of the rollout term (RL)."""


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
        sum(n > 0 for n in rollout),
        sum(rollout),
        sum(n > 0 for n in demo),
        sum(demo),
        sum(row.loss_tokens > 0 for row in rows),
        sum(len(row.ids) for row in rows),
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


def demo_row(example: Example, tokens: int | None = None) -> Row:
    """The row of an example's demonstration; only its last `tokens` have a loss (None: all)."""
    demo = example.demo or ()
    with_loss = len(demo) if tokens is None else min(tokens, len(demo))
    ids = example.prompt + demo
    mask = example.demo_mask[len(demo) - with_loss :]
    return Row(ids, len(ids) - with_loss, True, 1.0, source=example.source, mask=mask)


class MicroBatch(NamedTuple):
    """Rows of one kind that pass through the model together; possibly none on this rank."""

    rows: list[Row]
    batch: Batch
    demo: bool
    last: bool
    """Whether it is the last one of its rows."""


_kind = operator.attrgetter("kind")
Unit = Sequence[Row]  # consecutive rows that are never split


@dataclass(frozen=True)
class MicroBatches:
    """Options for splitting a rank's rows of one kind into micro-batches."""

    rows: int | None = None
    """Rows per micro-batch if `tokens` is None; None: all."""
    tokens: int | None = None
    """Tokens per micro-batch, including padding unless the rows are packed. A unit with more tokens
    is a micro-batch of its own."""
    packed: bool = False
    """Concatenate the rows instead of padding them; requires `tokens`."""
    unit: int = 1
    """Number of consecutive rows that are never split across micro-batches."""

    def batches(
        self, rows: Sequence[Row], pad_token: int, device: torch.device
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of `rows`, each of rows of one kind.

        Every rank gets the same sequence of demonstration and rollout micro-batches, some of them
        empty, because each forward of the policy or the reference may be a collective.
        """
        kinds: dict[bool, list[list[Row]]] = {False: [], True: []}
        for (demo, *_), group in itertools.groupby(sorted(rows, key=_kind), _kind):
            kinds[demo].append(list(group))
        splits = {demo: [*itertools.chain(*map(self.split, kinds[demo]))] for demo in kinds}
        counts = collectives.largest([len(parts) for parts in splits.values()])
        parts: list[tuple[bool, list[Row]]] = []
        for (demo, own), count in zip(splits.items(), map(int, counts), strict=True):
            if len(kinds[demo]) == 1:
                # smaller micro-batches instead of empty ones
                own = self.split(kinds[demo][0], count)
            parts += [(demo, part) for part in own + [[]] * (count - len(own))]
        for number, (demo, part) in enumerate(parts, 1):
            batch = collate(part, pad_token, device, self.packed)
            yield MicroBatch(part, batch, demo, number == len(parts))

    def split(self, rows: Sequence[Row], min_count: int = 1) -> list[list[Row]]:
        """Split `rows` into micro-batches.

        min_count: with packing, the minimum number of micro-batches, if there are enough units.
        """
        if self.tokens is None:
            size = max(self.rows // self.unit, 1) * self.unit if self.rows else max(len(rows), 1)
            return [list(rows[i : i + size]) for i in range(0, len(rows), size)]
        units = [rows[i : i + self.unit] for i in range(0, len(rows), self.unit)]
        parts = self._pack(units, min_count) if self.packed else self._fill(units)
        return [[row for unit in part for row in unit] for part in parts]

    def _cost(self, unit: Unit) -> int:
        """Tokens of a unit; one that exceeds the budget uses it up, so that it stays alone."""
        assert self.tokens is not None
        lengths = [len(row.ids) for row in unit]
        return min(sum(lengths) if self.packed else len(lengths) * max(lengths), self.tokens)

    def _pack(self, units: Sequence[Unit], min_count: int) -> list[list[Unit]]:
        """Distribute the units over few parts with similar numbers of tokens.

        Greedy: longest unit first, each to the part with the fewest tokens.
        """
        assert self.tokens is not None
        costs = list(map(self._cost, units))
        order = sorted(range(len(units)), key=lambda i: -costs[i])
        count = max(-(-sum(costs) // self.tokens), min(min_count, len(units)))
        while True:
            heap = [(0, part) for part in range(count)]
            parts: list[list[int]] = [[] for _ in heap]
            for i in order:
                load, part = heapq.heappop(heap)
                parts[part].append(i)
                heapq.heappush(heap, (load + costs[i], part))
            if all(load <= self.tokens for load, _ in heap):
                return [[units[i] for i in sorted(part)] for part in parts]
            count += 1  # terminates: one unit per part always fits

    def _fill(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """Group units of similar length; a group has at most `tokens` tokens, with padding."""
        assert self.tokens is not None
        parts: list[list[Unit]] = []
        cost = remaining = 0  # tokens per unit of the current part; tokens left in its budget
        for unit in sorted(units, key=self._cost, reverse=True):
            if not parts or cost > remaining:
                parts.append([])
                # the first unit of a part is the longest, and the others are padded to it
                cost, remaining = self._cost(unit), self.tokens
            parts[-1].append(unit)
            remaining -= cost
        return parts


def assign_rows(rows: Sequence[Row], ranks: int, together: int = 1) -> list[list[Row]]:
    """Assign `rows` to ranks, keeping their order. Deterministic, so all ranks get the same result.

    Greedy: longest first, each to the rank with the fewest tokens in the row's group; ties are
    broken by total tokens. A group contains the rows that may share a forward: rows of one kind,
    either all with or all without a gradient.

    together: number of consecutive rows of one kind that must stay on one rank.
    """
    kinds: dict[tuple, list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault(row.kind, []).append(i)
    units = [k[i : i + together] for k in kinds.values() for i in range(0, len(k), together)]
    groups: dict[tuple, list[tuple[int, list[int]]]] = {}
    for unit in units:
        first = rows[unit[0]]
        group = (*first.kind, first.is_demo or first.advantage != 0)
        groups.setdefault(group, []).append((sum(len(rows[i].ids) for i in unit), unit))
    owner, total = [0] * len(rows), [0] * ranks
    for sized in groups.values():
        load = [0] * ranks
        for tokens, unit in sorted(sized, key=lambda u: -u[0]):
            chosen = min(range(ranks), key=lambda r: (load[r], total[r]))
            load[chosen] += tokens
            total[chosen] += tokens
            for i in unit:
                owner[i] = chosen
    return [[row for row, r in zip(rows, owner, strict=True) if r == rank] for rank in range(ranks)]


def rebalance(rows: Sequence[Row], together: int) -> list[Row]:
    """Exchange rows between ranks; return this rank's rows, renumbered. Call it on every rank."""
    # token ids are unpacked only by the rank that trains on them
    compact = [row._replace(ids=_packed(row.ids)) for row in rows]
    all_rows = [row for part in collectives.gather(compact) for row in part]
    own = assign_rows(all_rows, collectives.world_size(), together)[collectives.rank()]
    return [row._replace(ids=tuple(row.ids), sequence=i) for i, row in enumerate(own)]


def _packed(ids: tuple[int, ...]) -> Any:
    """Convert `ids` to an array of the same length that is pickled as bytes."""
    return array("i", ids)
