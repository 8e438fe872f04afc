"""From token lists to the tensors of one forward pass.

Legend: B rows, T the longest row. A row is a prompt and its response; only response tokens have a
loss. Rows are padded on the right, so position t of the targets is the token after input t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gac_kernels import LossSpec


class Row(NamedTuple):
    """One completion to learn from."""

    ids: tuple[int, ...]  # prompt and response
    start: int  # index of the response's first token in ids
    is_demo: bool
    advantage: float = 0.0
    index: int = -1  # place in the step's list of rollouts, to find log-probs again

    @property
    def response_tokens(self) -> int:
        return len(self.ids) - self.start


class Batch(NamedTuple):
    """The tensors of one forward pass."""

    input_ids: Tensor  # int64 [B, T]
    attention_mask: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, T]: the next token where it belongs to the response, else -100
    advantages: Tensor  # float32 [B], on the CPU
    is_demo: Tensor  # bool [B], on the CPU


def collate(rows: Sequence[Row], pad_token: int, device: torch.device | str = "cpu") -> Batch:
    """Pad `rows` into a batch; no rows give a batch of one token without loss."""
    width = max((len(row.ids) for row in rows), default=1)
    count = max(len(rows), 1)
    ids = torch.full((count, width), pad_token)
    mask = torch.zeros((count, width), dtype=torch.int64)
    targets = torch.full((count, width), -100)
    if not rows:
        mask[:] = 1
    for b, row in enumerate(rows):
        tokens = torch.tensor(row.ids)
        ids[b, : len(tokens)] = tokens
        mask[b, : len(tokens)] = 1
        first = max(row.start, 1)  # the first token of all has nothing to predict it
        targets[b, first - 1 : len(tokens) - 1] = tokens[first:]
    advantages = torch.tensor([row.advantage for row in rows] or [0.0])
    is_demo = torch.tensor([row.is_demo for row in rows] or [False])
    return Batch(ids.to(device), mask.to(device), targets.to(device), advantages, is_demo)


def split(rows: Sequence[Row], size: int | None) -> Iterator[Sequence[Row]]:
    """Micro-batches of at most `size` rows, in order; None = one."""
    size = size or max(len(rows), 1)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def denominators(rows: Sequence[Row]) -> list[float]:
    """[rollouts, rollout tokens, demonstrations, demonstration tokens] of this rank's rows."""
    out = [0.0] * 4
    for row in rows:
        if row.response_tokens > 0:
            out[2 * row.is_demo] += 1
            out[2 * row.is_demo + 1] += row.response_tokens
    return out


def norms(counts: Sequence[float], spec: LossSpec) -> tuple[float, float]:
    """(rollout_norm, demo_norm) of the loss from global `denominators`."""
    pick = {"sequence": 0, "constant": 0, "token": 1}
    return counts[pick[spec.rollout_reduction]], counts[2 + pick[spec.demo_reduction]]
