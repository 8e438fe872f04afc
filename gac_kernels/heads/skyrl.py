"""The fused head for SkyRL's FSDP backend: log-probs and entropies without logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .lazy_head import lazy_head, logprobs
from .patch import Patch
from .transformers import LazyLogits


def _log_probs(logits: LazyLogits, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    logps, logits.record.entropy = logprobs(logits, labels)  # SkyRL asks for the entropy next
    return logps


def _entropy(
    logits: LazyLogits,
    requires_grad: bool = False,
    attention_mask: Tensor | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    with torch.set_grad_enabled(requires_grad):
        return logits.record.entropy * (1 if attention_mask is None else attention_mask)


def apply_fused_head() -> Patch:
    """Make SkyRL's FSDP models take log-probs and entropies from `gac_kernels`.

    Call it in each worker before the models are created.

    Returns:
        A handle with `undo`, which is also a context manager.

    Raises:
        ImportError: SkyRL is not installed, or its version has no such functions.
    """
    return lazy_head(
        "skyrl.backends.skyrl_train.workers.model_wrapper",
        "HFModelWrapper",
        {"logprobs_from_logits": _log_probs, "chunked_entropy_from_logits": _entropy},
    )
