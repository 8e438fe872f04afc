"""Tests whether a model supports packed rows, by small forward passes rather than by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gac.data.rows import Row, collate
from gac.models.head import Head

# Largest change that counts as rounding, relative to the effect of neighbors that a row can see.
# For tiny float32 models of all families it is at most 1e-5 or, if a convolution or a recurrent
# state passes from row to row, at least 1e-3.
FLOAT32, LOWER_PRECISION = 1e-4, 0.05
ROW = (1, 2, 3, 0, 1, 3, 2, 1)
NEIGHBORS = ((2, 1, 0, 3, 3), (0, 3, 2, 2, 1))


@torch.no_grad()
def supports_packing(model: nn.Module) -> bool:
    """Whether a prepared model treats each packed row as if it were the only one.

    The log-probs of a row must agree, up to rounding, with those of the row alone, whichever row it
    is packed with. Rounding is small compared to the effect of the same neighbors when the row can
    see them, as parts of one long row. In lower precision, rounding could hide the effect of a
    convolution, so models with a convolution are then not packed.
    """
    precise: list[bool] = []  # whether each forward computed in float32
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device

    def row_logps(*rows: tuple[int, ...], packed: bool = True) -> Tensor:
        batch = collate([Row(ids, 1, False) for ids in rows], 0, device, packed)

        def request(head: Head) -> Tensor:
            values = head.weight if head.logits is None else head.logits
            assert values is not None
            precise.append(
                values.dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
            )
            return head.logprobs(batch.targets)[0]

        logps = model(**batch.model_inputs, request=request).flatten()
        return logps[-len(ROW) : -1]  # only those that predict tokens of ROW from tokens of ROW

    for module in training:
        module.training = False
    try:
        packed = [row_logps(neighbor, ROW) for neighbor in NEIGHBORS]
        visible = [row_logps(neighbor + ROW) for neighbor in NEIGHBORS]
        alone = row_logps(ROW, packed=False)  # positions may be counted in another way
    except (TypeError, ValueError, NotImplementedError):
        return False  # the forward does not accept row bounds
    finally:
        for module in training:
            module.training = True
    effect = _distance(*visible)
    leaks = _distance(*packed), _distance(packed[0], alone), _distance(packed[1], alone)
    if all(precise):
        return bool(max(leaks) <= FLOAT32 * effect)
    convolution = any(isinstance(module, nn.Conv1d) for module in model.modules())
    return not convolution and bool(max(leaks) <= LOWER_PRECISION * effect)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().max()
