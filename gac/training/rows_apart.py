"""Tests whether a model supports packed rows, by a small forward pass instead of a list of names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gac.data.rows import Row, collate


@torch.no_grad()
def keeps_rows_apart(model: nn.Module) -> bool:
    """Whether a prepared model treats each packed row as if it were alone.

    Tested on a few tokens: changing one row must leave the log-probabilities of the next bitwise
    unchanged.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device

    def scores(*rows: tuple[int, ...]) -> Tensor:
        batch = collate([Row(ids, 1, False) for ids in rows], 0, device, packed=True)
        ask = lambda head: head.logprobs(batch.targets)[0]  # noqa: E731 - one expression
        return model(**batch.model_inputs, request=ask)[0, batch.starts[-1] :]

    row = (1, 2, 3, 0, 1)
    try:
        one, other, alone = scores((2, 1, 0), row), scores((0, 3, 2), row), scores(row)
    except TypeError:  # the forward does not accept these keywords
        return False
    finally:
        model.train(was_training)
    return torch.equal(one, other) and torch.allclose(one, alone, rtol=0.05, atol=0.05)
