"""The held-out loss of demonstrations: the negative log-likelihood of reference solutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gac import collectives
from gac.data import Example
from gac.data.micro_batches import demo_row
from gac.models.head import run_head
from gac.models.sampling_mode import sampling_mode
from gac.rows import Row, collate

TOKENS = 4096  # tokens per forward, padding included


@torch.no_grad()
def demo_nll(model: Any, examples: Sequence[Example], pad_token: int) -> float | None:
    """Mean negative log-likelihood per token of the demonstrations, in nats.

    Call it on every rank; each computes a part of the demonstrations. Tokens that have no loss in
    training, such as those of tools, do not count.

    Args:
        model: a patched model, or a wrapper of one.
        examples: prompts, of which some have a demonstration.
        pad_token: id of the padding token.

    Returns:
        The same on every rank; None if no example has a demonstration.
    """
    batches = _batches([demo_row(example) for example in examples if example.demo])
    own = batches[collectives.rank() :: collectives.world_size()]
    device = next(model.parameters()).device
    nll = tokens = 0.0
    with sampling_mode(model):
        # a sharded model needs all ranks: those without a batch compute one dummy token
        for i in range(-(-len(batches) // collectives.world_size())):
            batch = collate(own[i] if i < len(own) else [], pad_token, device)
            logps, _ = run_head(model, **batch.model_inputs).logprobs(batch.targets)
            scored = batch.targets >= 0
            nll -= float(logps.double()[scored].sum())
            tokens += int(scored.sum())
    nll, tokens = collectives.total([nll, tokens])
    return nll / tokens if tokens else None


def _batches(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows of similar length, with at most `TOKENS` tokens when padded."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if groups and (len(groups[-1]) + 1) * len(row.ids) <= TOKENS:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
