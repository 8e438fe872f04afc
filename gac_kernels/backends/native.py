"""Row kernels in vectorised C++ for the CPU, in `csrc`; see `backends` for the functions. Tensors
on a GPU go to `cuda`, the kernels of `csrc/cuda`.

A row is finished while it is in the L2: sums, token formulas, gradient. Rows run in parallel and
each one is summed in a fixed order, so results do not depend on the number of threads. They do
depend, within rounding, on the instruction set, which is chosen when the kernels are first used:
the widest of AVX-512, AVX2 and the baseline that the processor has, or what the environment
variable GAC_CPU_CAPABILITY names. The AVX-512 kernels were compiled and not run.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..contract import KL_ESTIMATORS, REDUCTIONS, DemoWeight, LossSpec, TokenMoments
from ..tokens import Summary, Tokens, TokenTerms
from . import cuda, triton
from . import reference as definition

LIBRARY = Path(__file__).parent.parent / "_native.so"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEMO_WEIGHTS = tuple(DemoWeight)  # C++ knows both enumerations by position


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cuda":
        return cuda.unavailable(device, dtype)
    if device.type != "cpu":
        return f"it runs on CPUs and CUDA GPUs, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it computes in float32 and has no {dtype}; use backend='reference'"
    return _load()


def capability() -> str:
    """The instruction set in use: "default", "avx2" or "avx512"."""
    if reason := _load():
        raise RuntimeError(f"no native kernels: {reason}")
    return torch.ops.gac_native.cpu_capability()


def plan(
    targets: Tensor,
    advantages: Tensor,
    is_demo: Tensor,
    mu: float | Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: LossSpec,
    rollout_norm: float | Tensor | None,
    demo_norm: float | Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tokens:
    if targets.is_cuda:
        return _beside_cuda(targets.device).plan(
            targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, spec,
            rollout_norm, demo_norm, dtype,
        )  # fmt: skip
    norms = (None if norm is None else float(norm) for norm in (rollout_norm, demo_norm))
    live, demo, advantage, old, ref, *rest = torch.ops.gac_native.plan(
        targets, advantages, is_demo, float(mu), old_logps, ref_logps, cu_seqlens,
        spec.demo_weight is DemoWeight.SHAPED, REDUCTIONS.index(spec.rollout_reduction),
        REDUCTIONS.index(spec.demo_reduction), spec.max_tokens or 1.0, *norms,
    )  # fmt: skip
    weight, scale, sequence, offsets, lengths = rest
    return Tokens(
        targets.reshape(-1), live, demo, advantage, None if old_logps is None else old,
        None if ref_logps is None else ref, weight, scale, sequence, offsets, lengths, is_demo, mu,
    )  # fmt: skip


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> Summary:
    if tokens.live.is_cuda:
        return _beside_cuda(tokens.live.device).reduce(tokens, terms, moments)
    results = torch.ops.gac_native.reduce(
        tokens.live, tokens.demo, tokens.advantages, tokens.weight, tokens.offsets, tokens.lengths,
        tokens.is_demo, float(tokens.mu), tokens.ref is not None, terms.logps, terms.entropy,
        terms.loss, terms.kl, terms.clipped, moments,
    )  # fmt: skip
    statistics = TokenMoments(*results[5:]) if moments else None
    return Summary(*(*results[:5], statistics))


def _beside_cuda(device: torch.device) -> ModuleType:
    """Who does the work of size N around the CUDA kernels."""
    return definition if triton.unavailable(device, torch.float32) else triton


def row_stats(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    if logits.is_cuda:
        return cuda.row_stats(logits, targets, temperature)
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
    if logits.is_cuda:
        cuda.row_grads(logits, targets, lse, entropy, d_logps, d_entropy, temperature, out)
        return
    # The sums cost nothing while the row is in cache, and are better than `lse` rounded to float32.
    torch.ops.gac_native.row_grads(logits, targets, d_logps, d_entropy, temperature, out)


def row_loss(logits: Tensor, tokens: Tokens, spec: LossSpec, out: Tensor | None) -> TokenTerms:
    if logits.is_cuda:
        return cuda.row_loss(logits, tokens, spec, out)
    return TokenTerms(
        *torch.ops.gac_native.row_loss(
            logits,
            tokens.targets,
            tokens.demo,
            tokens.advantages,
            tokens.old,
            tokens.ref,
            tokens.scale,
            -math.inf if spec.clip_low is None else 1 - spec.clip_low,
            math.inf if spec.clip_high is None else 1 + spec.clip_high,
            math.inf if spec.dual_clip is None else spec.dual_clip,
            spec.kl_coef,
            KL_ESTIMATORS.index(spec.kl_estimator),
            spec.entropy_coef,
            _DEMO_WEIGHTS.index(spec.demo_weight),
            spec.demo_shape,
            spec.temperature,
            out,
        )
    )


def scale_(tensor: Tensor, factor: Tensor) -> None:
    if tensor.is_cuda:
        cuda.scale_(tensor, factor)
    elif factor.item() != 1:
        tensor.mul_(factor)


@functools.cache
def _load() -> str | None:
    """Load the library and register the shapes of its results; else say why not."""
    if not LIBRARY.exists():
        return "the extension is not built; reinstall with GAC_EXT=1 and a C++ compiler"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"{LIBRARY.name} does not load, rebuild it for this torch ({error})"
    _register_fakes()
    return None


def _register_fakes() -> None:
    @torch.library.register_fake("gac_native::plan")
    def _(
        targets: Tensor, advantages: Tensor, is_demo: Tensor, mu: float, old: Tensor | None,
        ref: Tensor | None, *_: object,
    ) -> tuple[Tensor, ...]:  # fmt: skip
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
    def _(live: Tensor, *others: Tensor | float) -> tuple[Tensor, ...]:
        # others[5] is the schema's `is_demo`, a tensor: `*others` cannot say so to mypy
        sequences = others[5].numel() if others[-1] else 0  # type: ignore[union-attr]
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
