"""The fused head for prime-rl: log-probs and entropies from `gac_kernels`."""

from __future__ import annotations

from torch import Tensor

from gac_kernels import linear_token_logprobs

from .patch import Patch, supported


class FusedLogProbs:
    """Replaces prime-rl's autograd function; only its `apply` is called."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, chunk_size: int
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies [N], each at the temperature of its token."""
        weight = weight.to(hidden.dtype)
        return linear_token_logprobs(hidden, weight, labels, temperature=1 / inv_temperature)


def apply_fused_head() -> Patch:
    """Replace the function behind prime-rl's `FusedOutputLinear`.

    Call it in each trainer process; models with a softcap (Gemma) keep prime-rl's own head.

    Returns:
        A handle with `undo`, which is also a context manager.

    Raises:
        ImportError: prime-rl is not installed, or its version has no such function.
    """
    name = "_SequenceChunkedLogProbEntropyFn"
    module = supported("prime_rl.trainer.models.layers.lm_head", name)
    return Patch((module, name, FusedLogProbs))
