"""The epilogue head: its GEMM stores exponentials, so that no logit reaches memory.

With logits, a chunk writes them in float32, a row kernel reads them twice and writes their
gradient, and the backward GEMMs read that: 12 bytes per logit beside the GEMMs' own. Here the
logits' GEMM stores 2^(z - c) in bfloat16, with c the target's logit, and sums in float32. The
gradient of a log-prob in a row's logits is the row of exponentials times one factor, except at the
target. The factor multiplies the row's hidden state for the gradient of the weight, and the result
for the gradient of the hidden state: 2 bytes per logit. The kernels are in
`backends/triton/exponentials.py`.

It is used if the environment variable GAC_HEAD is "epilogue" and `why_not` finds no reason against
it. Its speed has not been measured.

Notation: N tokens, V vocabulary size, H hidden size, M rows of a chunk or block.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import backends, projection
from .projection import Head
from .reference import TwoCalls
from .shards import ShardedRows
from .tokens import Index, NeedsGrad, Operands, Scaling, Tokens, TokenTerms, Upstream

if TYPE_CHECKING:
    from .backends.triton.exponentials import Exponentials
    from .contract import LossSpec

HEADS = ("logits", "epilogue")
CAPABILITY = (9, 0)  # of a GPU with the matrix instructions and bulk copies that the GEMM needs


def choose(op: Operands, *, entropy: bool, more_outputs: bool = False) -> Operands:
    """The operands with the backend of the epilogue head, if that is requested and possible.

    entropy: the entropies may have a gradient.

    Raises:
        ValueError: GAC_HEAD names no head.
    """
    requested = os.environ.get("GAC_HEAD", "logits")
    if requested not in HEADS:
        raise ValueError(f"GAC_HEAD={requested}: use one of {', '.join(HEADS)}")
    if requested == "logits" or op.weight is None:
        return op
    reason = why_not(op, entropy=entropy, more_outputs=more_outputs)
    if reason is not None:
        backends.warn_once(f"GAC_HEAD=epilogue cannot be used here: {reason}; using logits")
        return op
    if isinstance(op.backend, ShardedRows):
        return replace(op, backend=EpilogueShard(op.backend, len(op.weight)))
    return replace(op, backend=EpilogueRows(op.backend))


def why_not(op: Operands, *, entropy: bool, more_outputs: bool) -> str | None:
    """Why the epilogue head cannot compute a call; None if it can."""
    weight = op.weight
    assert weight is not None
    backend = op.backend.inner if isinstance(op.backend, ShardedRows) else op.backend
    if not isinstance(backend, ModuleType) or backends.name_of(backend) != "triton":
        return "it needs the Triton backend, one target per token and no teacher"
    if op.dtype != torch.bfloat16:
        return f"it needs bfloat16, not {op.dtype}"
    if more_outputs:
        return "it computes no further outputs"
    if entropy and op.softcap is not None:
        return "a softcap excludes gradients of entropies"
    # a weight of another dtype is copied, with aligned rows
    if weight.shape[1] % 8 != 0 or (weight.dtype == op.dtype and not has_aligned_rows(weight)):
        return "rows of the weight must start at multiples of 16 bytes"
    return device_error(op.rows.device)


def has_aligned_rows(x: Tensor) -> bool:
    """Whether bulk copies can read tiles of x [X, Y], of 2-byte elements."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def device_error(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None if they can."""
    if device.type != "cuda" or torch.version.hip:
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return "it needs a GPU with compute capability 9.0 or above"
    return None


def make_head(op: Operands, needs: NeedsGrad) -> Head:
    """The head of a call, as `choose` has decided."""
    uses_exponentials = isinstance(op.backend, (EpilogueRows, EpilogueShard))
    return EpilogueHead(op, needs) if uses_exponentials else Head(op, needs)


class EpilogueHead(Head):
    """A head whose blocks have exponentials in place of logits."""

    stores_logits = False

    def __init__(self, op: Operands, needs: NeedsGrad) -> None:
        super().__init__(op, needs)
        self.targets, self.scaling = op.backend.local(op.targets), op.scaling
        # what a token's row of exponentials is multiplied by
        self._factors = torch.zeros(len(op.rows), dtype=torch.float32, device=op.rows.device)

    def gather(self, index: Index, live: Tensor | None) -> Tensor:
        rows = super().gather(index, live)
        return rows if has_aligned_rows(rows) else rows.clone(memory_format=torch.contiguous_format)

    def logits(self, rows: Tensor, index: Index, out: Tensor | None) -> Any:
        """The exponentials of rows [M, H] of the tokens at `index`, stored in `out` [M, V]."""
        from .backends.triton.exponentials import exponentials

        tokens = index if isinstance(index, Tensor) else None
        return exponentials(
            rows=rows,
            weight=self.projection.weight,
            bias=self.projection.bias,
            targets=self.targets[index],
            scaling=self.scaling.at(index),
            values=out,
            tokens=tokens,
            factors=self._factors[index] if tokens is None else self._factors,
        )

    def add(self, index: Index, rows: Tensor, grad: Tensor, *, single_chunk: bool) -> None:
        """Add a chunk, whose gradient of the logits is `grad` [M, V] times the factors."""
        factors = self._factors[index][:, None]
        if self.needs.weight:
            scaled = torch.mul(rows, factors, out=torch.empty_like(rows))
            self.add_weight(scaled, grad, single_chunk=single_chunk)
        if self.needs.bias:
            self._d_bias += column_sums(grad, factors)
        if self.needs.rows:
            self.add_hidden(index, grad, factors)


def column_sums(values: Tensor, factors: Tensor) -> Tensor:
    """The sums of `values` [M, V] times `factors` [M, 1] over the rows, float32 [V].

    A GEMM, in which a float32 factor is the sum of three of the dtype of the values.
    """
    parts, rest = [], factors
    for _ in range(3):
        parts.append(rest.to(values.dtype))
        rest = rest - parts[-1]
    columns = torch.nn.functional.pad(torch.cat(parts, 1), (0, 5))  # 16 bytes per row
    sums = torch.empty(values.shape[1], columns.shape[1], device=values.device)
    projection.multiply(values.T, columns, sums)
    return sums.sum(1)


class EpilogueRows:
    """Backend (see `backends`) for blocks of `Exponentials` in place of logits."""

    def __init__(self, inner: ModuleType) -> None:
        self.plan, self.scale_, self.reduce = inner.plan, inner.scale_, inner.reduce

    def local(self, targets: Tensor) -> Tensor:
        """The columns of the targets in the rows of the weight."""
        return targets

    def row_stats(
        self,
        logits: Exponentials,
        targets: Tensor,
        scaling: Scaling,
        *,
        more_outputs: bool = False,
    ) -> tuple[Tensor, ...]:
        assert not more_outputs
        return logits.logps, logits.entropy, logits.lse

    def row_grads(
        self,
        logits: Exponentials,
        targets: Tensor,
        scaling: Scaling,
        upstream: Upstream,
        out: Tensor,  # the exponentials, [1, M, V]
    ) -> None:
        from .backends.triton.exponentials import finish

        finish(logits, targets, scaling, upstream)

    def row_loss(
        self,
        logits: Exponentials,
        tokens: Tokens,
        spec: LossSpec,
        out: Tensor | None,
        *,
        softcap: float | None = None,
    ) -> TokenTerms:
        from .backends.triton.loss import token_terms

        terms, derivatives = token_terms(logits.logps, logits.entropy, tokens, spec)
        if out is not None:
            upstream = Upstream(logits.lse, logits.entropy, *derivatives)
            temperature = spec.temperature if tokens.temperature is None else tokens.temperature
            self.row_grads(logits, tokens.targets, Scaling(temperature, softcap), upstream, out)
        return terms


class EpilogueShard(TwoCalls):
    """Backend (see `backends`) for the exponentials of a vocabulary shard of `width` entries.

    Each rank has its own references. A row's mass is then that of all ranks, relative to the
    reference of this one.
    """

    def __init__(self, shard: ShardedRows, width: int) -> None:
        super().__init__(EpilogueRows(shard.inner))
        self.shard, self.width = shard, width

    def local(self, targets: Tensor) -> Tensor:
        """The columns of the targets in this rank's rows of the weight."""
        return self.shard.local(targets, self.width)

    def row_stats(
        self,
        logits: Exponentials,
        targets: Tensor,
        scaling: Scaling,
        *,
        more_outputs: bool = False,
    ) -> tuple[Tensor, ...]:
        assert not more_outputs
        own = logits.logps, logits.entropy, logits.lse
        return self.shard.combine(own, targets, self.local(targets))

    def row_grads(
        self,
        logits: Exponentials,
        targets: Tensor,
        scaling: Scaling,
        upstream: Upstream,
        out: Tensor,  # the exponentials, [1, M, V]
    ) -> None:
        from .backends.triton.exponentials import finish, widen

        local = self.local(targets)
        widen(logits, local, upstream)
        finish(logits, local, scaling, upstream)
