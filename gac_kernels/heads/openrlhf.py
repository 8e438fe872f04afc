"""The fused head for OpenRLHF: log-probs and entropies without logits."""

from __future__ import annotations

from torch import Tensor

from .lazy_head import lazy_head, logprobs
from .patch import Patch
from .transformers import LazyLogits


def _log_probs(logits: LazyLogits, labels: Tensor, temperature: float = 1.0) -> Tensor:
    return logprobs(logits, labels, temperature)[0]


def _entropy(logits: LazyLogits) -> Tensor:
    return logprobs(logits, logits.record.terms[0][0].new_zeros(logits.shape[:-1]).long())[1]


def apply_fused_head() -> Patch:
    """Make OpenRLHF's actors take log-probs and entropies from `gac_kernels`.

    Call it in each worker before training. With ZeRO-3, whose weights exist only during a layer's
    forward, the models keep their own head.

    Returns:
        A handle with `undo`, which is also a context manager.

    Raises:
        ImportError: OpenRLHF is not installed, or its version has no such functions.
    """
    return lazy_head(
        "openrlhf.models.actor",
        "Actor",
        {"log_probs_from_logits": _log_probs, "compute_entropy": _entropy},
    )
