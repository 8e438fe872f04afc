"""Controller statistics of rollouts that a trainer has scored."""

from __future__ import annotations

import torch
from torch import Tensor

from gac_kernels import TokenMoments, loss_from_logprobs


def rollout_moments(
    logps: Tensor,  # [B, T]: token log-probabilities under the policy
    mask: Tensor,  # [B, T]: nonzero for tokens that are trained on
    advantages: Tensor,  # [B], [B, 1] or [B, T]
    *,
    entropy: Tensor | None = None,  # [B, T], nats
    ref_logps: Tensor | None = None,  # [B, T]: token log-probabilities under the reference policy
) -> TokenMoments:
    """Compute the controller's statistics of a batch of rollouts, without gradients.

    Without `entropy` or `ref_logps`, the corresponding moments are nan ("not measured").
    """
    trained = mask != 0
    if advantages.dim() == 2:
        advantages = advantages.expand(mask.shape)
    moments = loss_from_logprobs(
        logps,
        torch.where(trained, 0, -100),
        advantages,
        ref_logps=ref_logps,
        entropy=entropy,
    ).moments
    assert moments is not None
    return moments
