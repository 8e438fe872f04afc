"""Row kernels in vectorized C++, in `csrc/cpu`: backend "native" on a CPU.

Each row is completed while it is in the L2 cache: sums, token formulas, gradient. Rows run in
parallel and each one is summed in a fixed order, so results do not depend on the number of threads.
Up to rounding, they do depend on the instruction set, which is selected when the kernels are first
used: the widest of AVX-512, AVX2 and the baseline that the processor supports, or the one named by
the environment variable GAC_CPU_CAPABILITY.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..contract import LossSpec, TokenMoments
from ..inputs import BatchInputs
from ..scalars import DTYPES, plan_scalars, token_scalars
from ..sketch import RowSketch
from ..tokens import Summary, Tokens, TokenTerms

LIBRARY = Path(__file__).parent.parent / "_native.so"


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPUs and CUDA GPUs, not on {device.type}"
    if dtype not in DTYPES:
        return f"it computes in float32 and does not support {dtype}; use backend='reference'"
    return _load()


def capability() -> str:
    """The instruction set in use: "default", "avx2" or "avx512"."""
    if reason := _load():
        raise RuntimeError(f"the native kernels are not available: {reason}")
    return torch.ops.gac_native.cpu_capability()


def plan(inputs: BatchInputs, spec: LossSpec, dtype: torch.dtype = torch.float32) -> Tokens:
    targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, *norms = inputs
    columns = torch.ops.gac_native.plan(
        targets,
        advantages,
        is_demo,
        float(mu),
        old_logps,
        ref_logps,
        cu_seqlens,
        *plan_scalars(spec),
        *(None if norm is None else float(norm) for norm in norms),
    )
    live, demo, advantages, old, ref, weight, scale, sequence, offsets, lengths = columns
    old, ref = None if old_logps is None else old, None if ref_logps is None else ref
    per_token = targets.reshape(-1), live, demo, advantages, old, ref, weight, scale, sequence
    return Tokens(*per_token, offsets, lengths, is_demo, mu)


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> Summary:
    results = torch.ops.gac_native.reduce(
        tokens.live,
        tokens.demo,
        tokens.advantages,
        tokens.weight,
        tokens.offsets,
        tokens.lengths,
        tokens.is_demo,
        float(tokens.mu),
        tokens.ref is not None,
        *terms,
        moments,
    )
    statistics = TokenMoments(*results[5:]) if moments else None
    return Summary._make((*results[:5], statistics))


def row_stats(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.gac_native.row_stats(logits, targets, temperature)


def row_grads(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor,
    temperature: float,
    out: Tensor,
) -> None:
    # recomputing the sums is free while the row is in cache, and more accurate than `lse` rounded
    # to float32
    torch.ops.gac_native.row_grads(logits, targets, d_logps, d_entropy, temperature, out)


def row_loss(
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    sketch: RowSketch | None = None,
) -> TokenTerms:
    columns = tokens.targets, tokens.demo, tokens.advantages, tokens.old, tokens.ref, tokens.scale
    signs, buckets = (None, None) if sketch is None else sketch
    terms = torch.ops.gac_native.row_loss(
        logits, *columns, *token_scalars(spec), out, signs, buckets
    )
    return TokenTerms(*terms)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    if factor.item() != 1:
        tensor.mul_(factor)


@functools.cache
def _load() -> str | None:
    """Load the library and register its fake kernels. Return why that failed, or None."""
    if not LIBRARY.exists():
        return "the extension is not built; reinstall with GAC_EXT=1 and a C++ compiler"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"{LIBRARY.name} failed to load; rebuild it for this torch version ({error})"
    _register_fakes()
    return None


def _register_fakes() -> None:
    @torch.library.register_fake("gac_native::plan")
    def _(targets: Tensor, *others: Any) -> tuple[Tensor, ...]:
        is_demo, _, old, ref = others[1:5]

        def new(count: int, dtype: torch.dtype) -> Tensor:
            return targets.new_empty(count, dtype=dtype)

        n, sequences = targets.numel(), is_demo.numel()
        floats = (n, 0 if old is None else n, 0 if ref is None else n, n, n)
        return (
            *(new(n, torch.bool) for _ in range(2)),
            *(new(count, torch.float32) for count in floats),
            *(new(count, torch.int64) for count in (n, sequences + 1, sequences)),
        )

    @torch.library.register_fake("gac_native::reduce")
    def _(live: Tensor, *others: Any) -> tuple[Tensor, ...]:
        sequences = others[5].numel() if others[-1] else 0  # [5] is `is_demo`, [-1] `moments`
        fixed = (7, sequences, 6) if others[-1] else (0, 0, 0)
        return (
            *(live.new_empty((), dtype=torch.float32) for _ in range(5)),
            *(live.new_empty(count, dtype=torch.float64) for count in fixed),
        )

    def columns(logits: Tensor, count: int) -> tuple[Tensor, ...]:
        shape = logits.shape[0] * logits.shape[1]
        return tuple(logits.new_empty(shape, dtype=torch.float32) for _ in range(count))

    @torch.library.register_fake("gac_native::row_stats")
    def _(logits: Tensor, *_: object) -> tuple[Tensor, ...]:
        return columns(logits, 3)

    @torch.library.register_fake("gac_native::row_grads")
    def _(logits: Tensor, *_: object) -> None:
        return None

    @torch.library.register_fake("gac_native::row_loss")
    def _(logits: Tensor, *_: object) -> tuple[Tensor, ...]:
        return columns(logits, 5)
