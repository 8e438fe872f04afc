"""What the controller wants to know of rollouts that a trainer has scored."""

from __future__ import annotations

import torch
from torch import Tensor

from gac_kernels import TokenMoments, loss_from_logprobs


def rollout_moments(
    logps: Tensor,  # [B, T]: of the tokens, under the policy
    mask: Tensor,  # [B, T]: not 0 where a token is learnt
    advantages: Tensor,  # [B], [B, 1] or [B, T]
    *,
    entropy: Tensor | None = None,  # [B, T], nats
    ref_logps: Tensor | None = None,  # [B, T]: under the reference policy
) -> TokenMoments:
    """The moments of `gac_kernels` for a batch of rollouts; no gradient flows.

    Without `entropy` or `ref_logps` their part of the moments is nan, "not measured".
    """
    live = mask != 0
    if advantages.dim() == 2:
        advantages = advantages.expand(mask.shape)
    moments = loss_from_logprobs(
        logps.detach(), torch.where(live, 0, -100), advantages.float(),
        torch.zeros(len(mask), dtype=torch.bool), ref_logps=ref_logps,
        entropy=None if entropy is None else entropy.detach(),
    ).moments  # fmt: skip
    assert moments is not None
    return moments
