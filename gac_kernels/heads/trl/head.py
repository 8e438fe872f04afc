"""The fused head for TRL: log-probs, entropies and further outputs from `gac_kernels`.

TRL's trainers take these values from one function, `trl.trainer.utils._ChunkedLogProbFunction`,
which is looked up in every forward pass. `apply_fused_head` replaces it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gac_kernels import LossSpec, linear_token_logprobs
from gac_kernels.heads.patch import Patch

from . import distillation

HOOK = "_ChunkedLogProbFunction"
SUPPORTED = "1.15 or later"
LIGER = (
    "use_liger_kernel=True: {} with our LM head is not tested with Liger's layers; "
    "set use_liger_kernel=False"
)
# A training uses few specs; a new one in each step would be checked anew.
loss_spec = functools.lru_cache(maxsize=32)(LossSpec)


class HeadInputs(NamedTuple):
    """Arguments that TRL passes to its head: N hidden states, and how to compute the logits."""

    hidden: Tensor
    """[N, H], in the dtype of the computation."""
    weight: Tensor
    """[V, H], same dtype."""
    bias: Tensor | None
    """[V], same dtype, or None."""
    targets: Tensor
    """int64 [N]."""
    temperature: float
    softcap: float | None
    logit_scale: float


class HeadOutputs(NamedTuple):
    """Per-token values in TRL's order; None if not requested."""

    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None


Override = Callable[[HeadInputs], HeadOutputs]
_override: ContextVar[Override | None] = ContextVar("gac_trl_head", default=None)


@contextlib.contextmanager
def head_override(function: Override) -> Iterator[None]:
    """Within the context, `function` computes the head's outputs."""
    token = _override.set(function)
    try:
        yield
    finally:
        _override.reset(token)


def installed() -> contextlib.AbstractContextManager[Any]:
    """Use our head within the context, whether or not `apply_fused_head` was called."""
    on = getattr(trl_utils(), HOOK) is FusedLogProbs
    return contextlib.nullcontext() if on else Patch((trl_utils(), HOOK, FusedLogProbs))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor, count: Tensor | None) -> Tensor:
        ctx.count = count
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if grad.dim() == 0:
            return grad, grad, None
        if ctx.count is not None:
            return grad, grad.sum() / ctx.count, None
        return grad, grad.mean() if grad.numel() else grad.sum(), None


def with_gradient(values: Tensor, loss: Tensor, count: Tensor | None = None) -> Tensor:
    """`values` unchanged; their sum has, in addition, the gradient of `loss`.

    count: 0-d, how many of them the sum includes; None: all.
    """
    return _WithGradient.apply(values, loss, count)


def times(count: Tensor, factor: float) -> Tensor:
    """A count [] on a device times a number, in float64, without a read."""
    return count * torch.tensor(factor, dtype=torch.float64)


def _log_probs(inputs: HeadInputs, outputs: tuple[str, ...]) -> HeadOutputs:
    extra = tuple(name for name in outputs if name not in ("log_probs", "entropy"))
    log_probs, entropy, *rest = linear_token_logprobs(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        bias=inputs.bias,
        temperature=inputs.temperature,
        softcap=inputs.softcap,
        logit_scale=inputs.logit_scale,
        outputs=extra,
        wait=False,  # on a GPU, TRL passes only rows with a target
    )
    return HeadOutputs(log_probs, entropy if "entropy" in outputs else None)._replace(
        **dict(zip(extra, rest, strict=True))
    )


class FusedLogProbs:
    """Replaces TRL's autograd function; TRL calls only its `apply`."""

    @staticmethod
    @torch.compiler.disable  # the kernels gain nothing, and tracing them is slow
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> HeadOutputs:
        """Compute log_probs and the named `outputs`; the other outputs are None."""
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        inputs = HeadInputs(
            hidden.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            targets,
            temperature,
            softcap,
            logit_scale,
        )
        override = _override.get()
        with torch.autocast(hidden.device.type, enabled=False):
            return override(inputs) if override else _log_probs(inputs, outputs)


def apply_fused_head() -> Patch:
    """Make all TRL trainers compute log-probs, entropies and further outputs with our kernels.

    Applies to all models that TRL's trainers (SFT, DPO, KTO, RLOO, GRPO and others) have given a
    fused head or will give one, in this process, and to the divergences of its DistillationTrainer.
    A second call is a no-op.

    Returns:
        A handle with `undo`, which is also a context manager.

    Raises:
        ImportError: the installed TRL has no such hook; the message names the supported versions.
    """
    utils = trl_utils()
    from trl.trainer.base_trainer import _BaseTrainer

    replacements = [
        (utils, HOOK, FusedLogProbs),
        (_BaseTrainer, "__init__", _checked_init(_BaseTrainer)),
    ]
    if (module := distillation.distillation_module()) is not None:
        replacements.append((module, distillation.HOOK, distillation.divergence_loss))
    return Patch(*replacements)


@functools.cache
def _checked_init(trainer_class: Any) -> Callable[..., None]:
    """Wrap `trainer_class.__init__` to refuse options that our head does not support."""
    own = trainer_class.__init__

    @functools.wraps(own)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        options = keywords.get("args")
        if getattr(options, "use_liger_kernel", False):
            raise ValueError(LIGER.format(type(self).__name__))
        own(self, *args, **keywords)

    return init


def missing_hook() -> str | None:
    """Why the installed TRL cannot use our head, or None."""
    try:
        trl_utils()
    except ImportError as error:
        return str(error)
    return None


def trl_utils() -> Any:
    """The module of TRL that holds the hook.

    Raises:
        ImportError: TRL is not installed, or its trainers have no fused head.
    """
    try:
        import trl.trainer.utils as utils
    except ModuleNotFoundError as error:
        raise ImportError("apply_fused_head needs TRL: pip install 'gac-kernels[trl]'") from error
    if not (hasattr(utils, HOOK) and hasattr(utils, "add_fused_lm_head")):
        raise ImportError(
            f"trl=={version('trl')}: its trainers have no fused LM head to replace; "
            f"use TRL {SUPPORTED}"
        )
    return utils
