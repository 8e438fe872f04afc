"""The fused head for verl: log-probs and entropies from `gac_kernels`.

In verl, `use_fused_kernels=True` selects one of two functions. `apply_fused_head` replaces both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gac_kernels import linear_token_logprobs

from .patch import Patch, original, supported


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

    Call it in every worker process, or let verl import `gac_kernels.heads.verl_fused` there. It
    applies to models with `actor_rollout_ref.model.use_fused_kernels=True`; a head that is sharded
    over tensor-parallel ranks keeps verl's kernel. A second call is a no-op.

    Returns:
        A handle with `undo`, which is also a context manager.

    Raises:
        ImportError: verl is not installed, or its version has no such functions.
    """
    torch_functional = supported("verl.utils.experimental.torch_functional", "FusedLinearForPPO")
    kernel, name = "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"
    module = supported(kernel, name)
    return Patch(
        (torch_functional.FusedLinearForPPO, "forward", _linear_forward),
        (module, name, _kernel(original(module, name))),
    )


@functools.cache  # so that a second patch is a no-op
def _kernel(own: Any) -> Callable[..., Any]:
    """Replacement for verl's Triton kernel; returns flat outputs, as that kernel does."""

    def linear_cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        sharded = dist_process_group is not None and dist.get_world_size(dist_process_group) > 1
        if sharded or reduction.lower() != "none":
            return own(hidden, weight, labels, temperature, reduction, dist_process_group)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return _log_probs(flat, weight, labels.reshape(-1), temperature)

    return linear_cross_entropy
