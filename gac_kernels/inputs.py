"""What the public functions pass on: the rows with their head, and the caller's batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import DemoWeight, LossSpec
from .filter import GradientFilter


class Operands(NamedTuple):
    """The rows of a call, and how their distributions are computed.

    It is built once by a public function and passed unchanged to autograd or to an operator of
    `ops`, which take the fields up to `chunk_bytes` in this order, and to the loops over rows. The
    distribution of a row with logits x is the softmax of softcap tanh(x / softcap) / temperature.
    """

    rows: Tensor  # logits [B, T, V], or hidden states [N, H] if there is a weight
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]
    targets: Tensor  # int64 [N]
    temperatures: Tensor | None  # float32 or better, [N]; None: `temperature`
    temperature: float
    softcap: float | None  # None: no softcap
    backend: Any  # a module of `backends`, or an object with the same functions; in `ops`, its name
    dtype: torch.dtype  # of the logits, or that the operands of the head are rounded to
    chunk_bytes: int | None = None  # memory for logits and gradients; None: by device
    vocab_size: int | None = None  # determines the chunk sizes; None: rows of the weight
    filter: GradientFilter | None = None

    @property
    def vocabulary(self) -> int:
        return self.rows.shape[-1] if self.weight is None else self.weight.shape[0]

    def scaling(self, index: Tensor | None = None) -> float | Tensor:
        """The temperature of all rows, or of each row at `index` (None: all rows, in order)."""
        if self.temperatures is None:
            return self.temperature
        return self.temperatures if index is None else self.temperatures.index_select(0, index)


def part(x: float | Tensor, span: slice) -> float | Tensor:
    """The rows in `span` of a value that may be the same for all rows."""
    return x[span] if isinstance(x, Tensor) else x


class NeedsGrad(NamedTuple):
    """Which of rows, weight and bias need a gradient."""

    rows: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, *inputs: Tensor | None) -> NeedsGrad:
        """Read `requires_grad` of each input; all False if gradients are disabled."""
        on = torch.is_grad_enabled()
        return cls(*[on and x is not None and x.requires_grad for x in inputs])


class BatchInputs(NamedTuple):
    """The inputs of a batch other than its logits; shapes and meaning as in `fused_gac_loss`.

    The operators of `ops` take these fields in this order.
    """

    targets: Tensor  # int64 [B, T] or [N]
    advantages: Tensor  # [B], [B, T], [S] or [N]
    is_demo: Tensor  # bool [B], [B, T], [S] or [N]
    mu: float | Tensor = 0.5
    old_logps: Tensor | None = None  # like targets
    ref_logps: Tensor | None = None  # like targets
    cu_seqlens: Tensor | None = None  # int [S + 1]; None: padded
    rollout_norm: float | Tensor | None = None
    demo_norm: float | Tensor | None = None
    weights: Tensor | None = None  # [B], [B, T], [S] or [N]
    rollout_logps: Tensor | None = None  # like targets
    temperatures: Tensor | None = None  # [B], [B, T], [S] or [N]; None: the temperature of the spec

    @property
    def sequences(self) -> int:
        return self.targets.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def is_per_sequence(self, x: Tensor) -> bool:
        """Whether `x` is [S], one value per sequence; if S == N, also True for values per token."""
        return x.shape == (self.sequences,)

    def to_targets_device(self) -> BatchInputs:
        """Detach all tensors and move them to the targets' device, without blocking the host.

        Tensors are moved before any conversion: a CUDA graph can capture copies from pinned memory
        only, and the result of a conversion on the CPU is not pinned.
        """
        device = self.targets.device

        def to_device(x: Any) -> Any:
            return x.detach().to(device, non_blocking=True) if isinstance(x, Tensor) else x

        return BatchInputs(*(to_device(x) for x in self))


def complete(
    targets: Tensor,
    advantages: Tensor | None = None,
    is_demo: Tensor | None = None,
    *,
    spec: object = None,
    mu: float | Tensor | None = None,
    **others: Any,
) -> BatchInputs:
    """The batch, with the roles that omitted arguments imply; nothing is read from a device.

    Without advantages every token is a demonstration; without `is_demo` every token is a rollout,
    if there are advantages. The weight of the only term is then 1.

    Raises:
        ValueError: `mu` is missing and both terms may have tokens, or advantages are missing.
    """
    if mu is None and advantages is not None and is_demo is not None:
        raise ValueError(
            "mu is None: a batch with advantages and is_demo needs the weight of its "
            "demonstrations, in [0, 1]; omit is_demo if all tokens are rollouts"
        )
    if advantages is None:
        has_rollouts = (
            isinstance(is_demo, Tensor)
            and is_demo.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not is_demo.all()
        )
        is_shaped = isinstance(spec, LossSpec) and spec.demo_weight is DemoWeight.SHAPED
        if has_rollouts or is_shaped:
            raise ValueError(
                "advantages is None: rollouts, and demonstrations with the weight 'shaped', "
                "require advantages"
            )
        is_demo = None  # every token is a demonstration
    mu = float(advantages is None) if mu is None else mu
    if is_demo is None:
        cu_seqlens, count = others.get("cu_seqlens"), targets.shape[0]
        if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1:  # packed
            count = len(cu_seqlens) - 1
        is_demo = torch.full((count,), advantages is None, device=targets.device)
    if advantages is None:
        advantages = torch.zeros_like(is_demo, dtype=torch.float32)
    return BatchInputs(targets, advantages, is_demo, mu, **others)
