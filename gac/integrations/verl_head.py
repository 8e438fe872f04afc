"""The fused head for verl: log-probs and entropies from `gac_kernels`.

In verl, `use_fused_kernels=True` selects one of two functions. `apply_fused_head` replaces both.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gac_kernels import linear_token_logprobs

from .patch import Patch


def _log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logps, entropy = linear_token_logprobs(
        hidden, weight.to(hidden.dtype), labels.long(), temperature=temperature
    )
    return logps, entropy


def _linear_forward(
    self: nn.Module,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Replacement for `FusedLinearForPPO.forward` of the backends "torch" and "liger"."""
    return _log_probs(hidden_states, vocab_weights, input_ids, temperature)


def apply_fused_head() -> Patch:
    """Replace verl's fused kernels for log-probs and entropies with those of `gac_kernels`.

    Call it in every worker process, or let verl import `gac.integrations.verl_fused` there. Applies
    to models with `actor_rollout_ref.model.use_fused_kernels=True`; a head that is sharded over
    tensor-parallel ranks keeps verl's kernel. A second call is a no-op.

    Returns:
        A handle with `undo`, which is also a context manager.

    Raises:
        ImportError: verl is not installed, or its version has no such functions.
    """
    try:
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        kernel = import_module("verl.utils.kernel.linear_cross_entropy")
    except ImportError as error:
        raise ImportError(f"apply_fused_head needs verl 0.9: {error}") from error
    current: Any = kernel.linear_cross_entropy
    own = getattr(current, "original", current)

    def linear_cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Replacement for verl's Triton kernel; returns flat outputs, as that kernel does."""
        sharded = dist_process_group is not None and dist.get_world_size(dist_process_group) > 1
        if sharded or reduction.lower() != "none":
            return own(hidden, weight, labels, temperature, reduction, dist_process_group)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return _log_probs(flat, weight, labels.reshape(-1), temperature)

    linear_cross_entropy.original = own  # type: ignore[attr-defined] # for a second call
    kernel_function = linear_cross_entropy if current is own else current
    return Patch(
        (FusedLinearForPPO, "forward", _linear_forward),
        (kernel, "linear_cross_entropy", kernel_function),
    )
