"""Row kernels in vectorized C++, in `csrc/cpu`: backend "native" on a CPU.

Each row is completed while it is in the L2 cache: sums, token formulas, gradient. Rows run in
parallel and each one is summed in a fixed order, so results do not depend on the number of threads.
Their rounding depends on the instruction set. It is selected when the kernels are first used: the
widest of AVX-512, AVX2 and the baseline that the processor supports, or the one that the
environment variable GAC_CPU_CAPABILITY names.

The library has a plain C interface, `csrc/cpu/native.h`, loaded with ctypes: one binary works with
every version of torch and Python. The operators of torch.compile are in `gac_kernels/ops.py`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import build_cuda
from ..contract import (
    MORE_OUTPUTS,
    REDUCTIONS,
    TOKEN_OPTIONS,
    DemoWeight,
    LossOutput,
    LossSpec,
    TokenMoments,
)
from ..reference import scale_ as scale_
from ..tokens import (
    DTYPES,
    ROW_COLUMNS,
    BatchInputs,
    Scaling,
    Tokens,
    TokenTerms,
    Upstream,
)

LIBRARY = Path(__file__).parent.parent / "_native.so"
FUNCTIONS = ("gac_plan", "gac_reduce", "gac_row_stats", "gac_row_grads", "gac_row_loss")


class Layout:
    """A structure of csrc/cpu/native.h: eight-byte fields, given as "kind: names" lines."""

    def __init__(self, fields: str) -> None:
        codes = {"pointer": "P", "int": "q", "real": "d"}
        lines = [line.split(":") for line in fields.strip().splitlines()]
        kinds = {name: kind.strip() for kind, names in lines for name in names.split()}
        self._absent = dict.fromkeys(kinds, 0)
        self._pack = struct.Struct("".join(codes[kind] for kind in kinds.values())).pack

    def pack(self, arrays: Mapping[str, Tensor | None], **numbers: float) -> bytes:
        """The bytes of the structure; what is not given, or None, is 0."""
        values = self._absent | numbers
        for name, array in arrays.items():
            if array is not None:
                values[name] = array.data_ptr()
        return self._pack(*values.values())


STATS = ("logps", "entropy", "lse")  # results of `row_stats`
COLUMNS = (  # arrays of a row function; null if absent
    "temperatures",
    "targets",
    *STATS,
    *MORE_OUTPUTS,
    "d_logps",
    "d_entropy",
    "demo",
    "advantages",
    "old",
    "ref",
    "scale",
    "factor",
    "rollout_logps",
    "loss",
    "kl",
    "clipped",
)
# followed by a TokenSpec, `LossSpec.packed_options`
ROW_ARGUMENTS = Layout(f"""
    pointer: logits
    int: dtype batch_stride row_stride
    pointer: out
    int: out_dtype out_batch_stride out_row_stride
    int: rows vocab per_batch threads
    real: temperature softcap
    pointer: {" ".join(COLUMNS)}
""")
NO_OPTIONS = bytes(8 * len(TOKEN_OPTIONS))
PLAN_ARGUMENTS = Layout("""
    pointer: targets advantages is_demo old ref cu_seqlens
    pointer: live demo advantage old_logps ref_logps weight scale sequence
    pointer: offsets lengths rollout_lengths
    int: tokens sequences per_sequence role_per_token
    real: mu
    int: shaped rollout_reduction demo_reduction
    real: max_tokens
    int: rollout_norm demo_norm
""")
REDUCE_ARGUMENTS = Layout("""
    pointer: live demo advantages weight offsets lengths rollout_lengths
    pointer: logps entropy loss kl clipped
    pointer: mixed_loss rollout_loss demo_loss mean_kl clip_fraction
    pointer: rollouts demo_nll totals
    int: tokens sequences
    real: mu
    int: has_ref
""")


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPUs and CUDA GPUs, not on {device.type}"
    if dtype not in DTYPES:
        return f"it computes in float32 and does not support {dtype}; use backend='reference'"
    return library_error()


def capability() -> str:
    """The instruction set in use: "default", "avx2" or "avx512"."""
    return library().gac_cpu_capability().decode()


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library.

    Raises:
        OSError: the library is missing, was built from other sources, or does not load.
        ValueError: GAC_CPU_CAPABILITY names an unknown or unsupported instruction set.
    """
    if not LIBRARY.exists():
        raise OSError("the extension is not built; run `GAC_EXT=1 pip install .`")
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        functions = [getattr(loaded, name) for name in FUNCTIONS]
        for name in ("gac_interface", "gac_cpu_capability"):
            getattr(loaded, name).restype = ctypes.c_char_p
        headers = (build_cuda.SOURCES / name for name in ("cpu/native.h", "token_math.h"))
        interface = hashlib.sha256(b"".join(x.read_bytes() for x in headers)).hexdigest()
        if loaded.gac_interface().decode() != interface:
            raise OSError("it was built from a different version of the sources")
    except (OSError, AttributeError) as error:
        raise OSError(
            f"{LIBRARY.name} failed to load ({error}); run `GAC_EXT=1 pip install .`"
        ) from error
    for function in functions:
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
        function.errcheck = _raise
    if loaded.gac_cpu_capability() is None:
        raise ValueError(
            f"GAC_CPU_CAPABILITY={os.environ['GAC_CPU_CAPABILITY']}: use default, or avx2 or "
            "avx512 if the processor supports it"
        )
    return loaded


library_error = functools.cache(lambda: build_cuda.error_of(library))


def plan(inputs: BatchInputs, spec: LossSpec, dtype: torch.dtype = torch.float32) -> Tokens:
    sequences = inputs.sequences
    one_advantage = inputs.is_per_sequence(inputs.advantages)
    one_role = inputs.is_per_sequence(inputs.is_demo)
    targets = _column(inputs.targets, torch.int64)
    old = _column(inputs.old_logps, torch.float32)
    ref = _column(inputs.ref_logps, torch.float32)
    flat, count = targets.reshape(-1), targets.numel()
    live = flat.new_empty(count, dtype=torch.bool)
    advantages = flat.new_empty(count, dtype=torch.float32)
    tokens = Tokens(
        targets=flat,
        live=live,
        demo=torch.empty_like(live),
        advantages=advantages,
        old=None if old is None else torch.empty_like(advantages),
        ref=None if ref is None else torch.empty_like(advantages),
        weight=torch.empty_like(advantages),
        scale=torch.empty_like(advantages),
        factor=None,  # see `with_factors`
        rollout_logps=None,
        temperature=None,
        sequence=torch.empty_like(flat),
        offsets=flat.new_empty(sequences + 1),
        lengths=flat.new_empty(sequences),
        rollout_lengths=flat.new_empty(sequences),
        mu=inputs.mu,
    )
    arrays = {
        "targets": targets,
        "advantages": _column(inputs.all_advantages(), torch.float32),
        "is_demo": _column(inputs.all_roles(), torch.bool),
        "old": old,
        "ref": ref,
        "cu_seqlens": _column(inputs.cu_seqlens, torch.int64),
        "live": tokens.live,
        "demo": tokens.demo,
        "advantage": tokens.advantages,
        "old_logps": tokens.old,
        "ref_logps": tokens.ref,
        "weight": tokens.weight,
        "scale": tokens.scale,
        "sequence": tokens.sequence,
        "offsets": tokens.offsets,
        "lengths": tokens.lengths,
        "rollout_lengths": tokens.rollout_lengths,
    }
    # numbers that C++ reads through a pointer, null if absent
    rollout_norm, demo_norm = (
        None if norm is None else ctypes.c_double(float(norm))
        for norm in (inputs.rollout_norm, inputs.demo_norm)
    )
    arguments = PLAN_ARGUMENTS.pack(
        arrays,
        tokens=count,
        sequences=sequences,
        per_sequence=one_advantage,
        role_per_token=not one_role,
        mu=float(inputs.mu),
        shaped=spec.demo_weight is DemoWeight.SHAPED,
        rollout_reduction=REDUCTIONS.index(spec.rollout_reduction),
        demo_reduction=REDUCTIONS.index(spec.demo_reduction),
        max_tokens=spec.max_tokens or 1.0,
        rollout_norm=0 if rollout_norm is None else ctypes.addressof(rollout_norm),
        demo_norm=0 if demo_norm is None else ctypes.addressof(demo_norm),
    )
    library().gac_plan(arguments)
    return tokens


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> LossOutput:
    logps, entropy, loss, kl, clipped = [_column(x, torch.float32) for x in terms]
    sequences, mixed_loss = tokens.lengths.numel(), loss.new_empty(())
    rollout_loss, demo_loss = torch.empty_like(mixed_loss), torch.empty_like(mixed_loss)
    mean_kl, clip_fraction = torch.empty_like(mixed_loss), torch.empty_like(mixed_loss)
    arrays = {
        "live": tokens.live,
        "demo": tokens.demo,
        "advantages": tokens.advantages,
        "weight": tokens.weight,
        "offsets": tokens.offsets,
        "lengths": tokens.lengths,
        "rollout_lengths": tokens.rollout_lengths,
        "logps": logps,
        "entropy": entropy,
        "loss": loss,
        "kl": kl,
        "clipped": clipped,
        "mixed_loss": mixed_loss,
        "rollout_loss": rollout_loss,
        "demo_loss": demo_loss,
        "mean_kl": mean_kl,
        "clip_fraction": clip_fraction,
    }
    statistics = None
    if moments:
        totals = loss.new_empty(6, dtype=torch.float64)
        statistics = TokenMoments(totals.new_empty(7), totals.new_empty(sequences), totals)
        arrays |= vars(statistics)
    arguments = REDUCE_ARGUMENTS.pack(
        arrays,
        tokens=tokens.live.numel(),
        sequences=sequences,
        mu=float(tokens.mu),
        has_ref=tokens.ref is not None,
    )
    library().gac_reduce(arguments)
    return LossOutput(
        loss=mixed_loss,
        rollout_loss=rollout_loss,
        demo_loss=demo_loss,
        kl=mean_kl,
        clip_fraction=clip_fraction,
        logps=terms.logps,
        entropy=terms.entropy,
        moments=statistics,
    )


def row_stats(
    logits: Tensor, targets: Tensor, scaling: Scaling, *, more_outputs: bool = False
) -> tuple[Tensor, ...]:
    count, names = targets.numel(), STATS + MORE_OUTPUTS if more_outputs else STATS
    results = {name: targets.new_empty(count, dtype=torch.float32) for name in names}
    columns = {"targets": _column(targets, torch.int64), **results}
    _run(library().gac_row_stats, logits, None, scaling, columns)
    return tuple(results.values())


def row_grads(
    logits: Tensor,
    targets: Tensor,
    scaling: Scaling,
    upstream: Upstream,
    out: Tensor,
    *,
    whole_row: bool = True,
) -> None:
    floats = {"d_logps": upstream.d_logps, "d_entropy": upstream.d_entropy}
    # recomputing the sums is free while the row is in cache, and more accurate than `lse` rounded
    # to float32
    if not whole_row:
        floats |= {"lse": upstream.lse, "entropy": upstream.entropy}
    columns = {name: _column(x, torch.float32) for name, x in floats.items()}
    columns["targets"] = _column(targets, torch.int64)
    _run(library().gac_row_grads, logits, out, scaling, columns)


def row_loss(
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    *,
    softcap: float | None = None,
) -> TokenTerms:
    terms = TokenTerms._make([torch.empty_like(tokens.scale) for _ in TokenTerms._fields])
    given = {name: getattr(tokens, name) for name in ROW_COLUMNS}
    dense = {name: None if x is None else x.contiguous() for name, x in given.items()}
    temperature = spec.temperature if tokens.temperature is None else tokens.temperature
    columns, scaling = dense | terms._asdict(), Scaling(temperature, softcap)
    _run(library().gac_row_loss, logits, out, scaling, columns, spec.packed_options)
    return terms


def _run(
    function: Any,  # of the library
    logits: Tensor,
    out: Tensor | None,
    scaling: Scaling,
    columns: dict[str, Any],  # by the names of COLUMNS
    options: bytes = NO_OPTIONS,
) -> None:
    """Run a function on the rows of logits, and of their gradient `out`, [B, T, V]."""
    batch, length, width = logits.shape
    temperature, softcap = scaling
    arrays = {"logits": logits, "out": out, **columns}
    if isinstance(temperature, Tensor):
        arrays["temperatures"], temperature = _column(temperature, torch.float32), 1.0
    gradient = logits if out is None else out  # without one, its layout is not read
    batch_stride, row_stride, _ = logits.stride()
    out_batch_stride, out_row_stride, _ = gradient.stride()
    arguments = ROW_ARGUMENTS.pack(
        arrays,
        dtype=DTYPES.index(logits.dtype),
        batch_stride=batch_stride,
        row_stride=row_stride,
        out_dtype=DTYPES.index(gradient.dtype),
        out_batch_stride=out_batch_stride,
        out_row_stride=out_row_stride,
        rows=batch * length,
        vocab=width,
        per_batch=length,
        threads=torch.get_num_threads(),
        temperature=temperature,
        softcap=softcap or 0.0,
    )
    function(arguments + options)


def _column(x: Any, dtype: torch.dtype) -> Any:
    """`x` as a contiguous tensor of `dtype`; None stays None."""
    if x is None or (x.dtype is dtype and x.is_contiguous()):
        return x
    return x.to(dtype).contiguous()


def _raise(error: bytes | None, *_: Any) -> None:
    """Raise the error that a function of the library returned."""
    if error:
        raise RuntimeError(f"the native CPU kernels failed: {error.decode()}")
