"""Tests whether a model supports packed rows, with small forward passes, not a list of names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gac.data.rows import Row, collate
from gac.models.head import Head

LEAK = 0.05  # largest part of the effect of visible neighbors that counts as rounding
ROW = (1, 2, 3, 0, 1, 3, 2, 1)
NEIGHBORS = ((2, 1, 0, 3, 3), (0, 3, 2, 2, 1))


@torch.no_grad()
def supports_packing(model: nn.Module) -> bool:
    """Whether a prepared model treats each packed row as if it were the only one.

    The log-probs of a row must agree, up to rounding, whatever row it is packed with, and with
    those of the row alone. What rounding is, is measured: the effect of the same neighbors when
    the row can see them, as parts of one long row, must be at least 20 times as large.
    """
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device

    def row_logps(*rows: tuple[int, ...]) -> Tensor:
        batch = collate([Row(ids, 1, False) for ids in rows], 0, device, packed=True)

        def request(head: Head) -> Tensor:
            return head.logprobs(batch.targets)[0]

        logps = model(**batch.model_inputs, request=request).flatten()
        return logps[-len(ROW) : -1]  # those that predict tokens of ROW from tokens of ROW

    for module in training:
        module.training = False
    try:
        packed = [row_logps(neighbor, ROW) for neighbor in NEIGHBORS]
        visible = [row_logps(neighbor + ROW) for neighbor in NEIGHBORS]
        alone = row_logps(ROW)
    except (TypeError, ValueError, NotImplementedError):
        return False  # the forward does not accept row bounds
    finally:
        for module in training:
            module.training = True
    effect = _distance(*visible)
    leaks = _distance(*packed), _distance(packed[0], alone), _distance(packed[1], alone)
    return bool(max(leaks) <= LEAK * effect)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().max()
