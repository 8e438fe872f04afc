"""Tests whether a model supports packed rows, with a small forward pass, not a list of names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gac.data.rows import Row, collate
from gac.models.causal_lm import Head


@torch.no_grad()
def supports_packing(model: nn.Module) -> bool:
    """Whether a prepared model treats each packed row as if it were the only one.

    Tested on a few tokens: changing one row must leave the log-probs of the next bitwise unchanged.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device

    def last_row_logps(*rows: tuple[int, ...]) -> Tensor:
        batch = collate([Row(ids, 1, False) for ids in rows], 0, device, packed=True)

        def request(head: Head) -> Tensor:
            return head.logprobs(batch.targets)[0]

        return model(**batch.model_inputs, request=request)[0, batch.starts[-1] :]

    row = (1, 2, 3, 0, 1)
    try:
        after_a, after_b = last_row_logps((2, 1, 0), row), last_row_logps((0, 3, 2), row)
        unpacked = last_row_logps(row)
    except TypeError:  # the forward does not accept these keywords
        return False
    finally:
        model.train(was_training)
    close = torch.allclose(after_a, unpacked, rtol=0.05, atol=0.05)
    return torch.equal(after_a, after_b) and close
