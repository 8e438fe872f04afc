"""The fused head for prime-rl: log-probs and entropies from `gac_kernels`."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from gac_kernels import linear_token_logprobs

from .patch import Patch


class FusedLogProbs:
    """Replaces prime-rl's autograd function; only its `apply` is called."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, chunk_size: int
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies [N], each at the temperature of its token."""
        scaled = (hidden * inv_temperature[:, None]).to(hidden.dtype)
        return linear_token_logprobs(scaled, weight.to(hidden.dtype), labels)


def apply_fused_head() -> Patch:
    """Replace the function behind prime-rl's `FusedOutputLinear`.

    Call it in each trainer process; models with a softcap (Gemma) keep prime-rl's own head.

    Returns:
        A handle with `undo`, which is also a context manager.

    Raises:
        ImportError: prime-rl is not installed, or its version has no such function.
    """
    name = "_SequenceChunkedLogProbEntropyFn"
    try:
        module = import_module("prime_rl.trainer.models.layers.lm_head")
        getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"apply_fused_head needs prime-rl 0.7 or later: {error}") from error
    return Patch((module, name, FusedLogProbs))
