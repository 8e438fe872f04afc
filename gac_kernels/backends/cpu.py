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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import build_cuda
from ..contract import REDUCTIONS, DemoWeight, LossOutput, LossSpec, TokenMoments
from ..filter import RowMarks
from ..reference import scale_ as scale_
from ..tokens import DTYPES, ROW_COLUMNS, BatchInputs, Tokens, TokenTerms

LIBRARY = Path(__file__).parent.parent / "_native.so"
FUNCTIONS = ("gac_plan", "gac_reduce", "gac_row_stats", "gac_row_grads", "gac_row_loss")


class Layout:
    """A structure of csrc/cpu/native.h: eight-byte fields, given as "kind: names" lines."""

    def __init__(self, fields: str) -> None:
        kinds = {"pointer": "P", "int": "q", "real": "d"}
        lines = (line.split(":") for line in fields.strip().splitlines())
        codes = "".join(kinds[kind.strip()] * len(names.split()) for kind, names in lines)
        self._pack, self._zeros = struct.Struct(codes).pack, (0,) * len(codes)

    def pack(self, *values: Any) -> bytes:
        """The bytes of the structure; fields without a value are 0."""
        return self._pack(*values, *self._zeros[len(values) :])


COLUMNS = (  # arrays of a row function; null if absent
    *("temperatures", "targets", "logps", "entropy", "lse"),
    *("log_sum_sq_probs", "mean_logits", "is_top1", "d_logps", "d_entropy"),
    *("demo", "advantages", "old", "ref", "scale", "factor", "rollout_logps"),
    *("loss", "kl", "clipped", "hit", "sums"),
)
ROW_ARGUMENTS = Layout(f"""
    pointer: logits
    int: dtype batch_stride row_stride
    pointer: out
    int: out_dtype out_batch_stride out_row_stride
    int: rows vocab per_batch threads
    real: temperature softcap eps
    pointer: {" ".join(COLUMNS)}
    real: ratio_low ratio_high dual_clip kl_coef
    int: kl_estimator
    real: entropy_coef
    int: demo_weight
    real: demo_shape
    int: policy
    real: sapo_tau_positive sapo_tau_negative
    int: kl_ratio mask_correction
    real: correction_min correction_max
""")
PLAN_ARGUMENTS = Layout("""
    pointer: targets advantages is_demo old ref cu_seqlens
    pointer: live demo advantage old_logps ref_logps weight scale sequence
    pointer: offsets lengths rollout_lengths
    int: tokens sequences per_sequence role_per_token
    real: mu
    int: shaped rollout_reduction demo_reduction
    real: max_tokens
    pointer: rollout_norm demo_norm
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
        header = (build_cuda.SOURCES / "cpu" / "native.h").read_bytes()
        if loaded.gac_interface().decode() != hashlib.sha256(header).hexdigest():
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
    targets, is_demo = _column(inputs.targets, torch.int64), _column(inputs.is_demo, torch.bool)
    columns = (
        targets,
        _column(inputs.advantages, torch.float32),
        is_demo,
        _column(inputs.old_logps, torch.float32),
        _column(inputs.ref_logps, torch.float32),
        _column(inputs.cu_seqlens, torch.int64),
    )
    n, sequences, flat = targets.numel(), inputs.sequences, targets.reshape(-1)
    floats, flags = flat.new_empty(n, dtype=torch.float32), flat.new_empty(n, dtype=torch.bool)
    results = (
        flags,
        torch.empty_like(flags),
        floats,
        None if columns[3] is None else torch.empty_like(floats),
        None if columns[4] is None else torch.empty_like(floats),
        torch.empty_like(floats),
        torch.empty_like(floats),
        torch.empty_like(flat),
        flat.new_empty(sequences + 1),
        flat.new_empty(sequences),
        flat.new_empty(sequences),
    )
    norms = [
        None if norm is None else ctypes.c_double(float(norm))
        for norm in (inputs.rollout_norm, inputs.demo_norm)
    ]
    arguments = PLAN_ARGUMENTS.pack(
        *_pointers(columns),
        *_pointers(results),
        n,
        sequences,
        inputs.is_per_sequence(inputs.advantages),
        not inputs.is_per_sequence(is_demo),
        inputs.mu,
        spec.demo_weight is DemoWeight.SHAPED,
        REDUCTIONS.index(spec.rollout_reduction),
        REDUCTIONS.index(spec.demo_reduction),
        spec.max_tokens or 1.0,
        *(0 if norm is None else ctypes.addressof(norm) for norm in norms),
    )
    library().gac_plan(arguments)
    factors = None, None, None  # see `with_factors`
    fields = flat, *results[:7], *factors, *results[7:], inputs.mu
    return Tokens._make(fields)


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> LossOutput:
    columns = [_column(term, torch.float32) for term in terms]
    sequences, scalar = tokens.lengths.numel(), columns[0].new_empty(())
    scalars = scalar, *[torch.empty_like(scalar) for _ in range(4)]
    statistics, sums = None, tuple[Tensor, ...]()
    if moments:
        totals = scalar.new_empty(6, dtype=torch.float64)
        sums = totals.new_empty(7), totals.new_empty(sequences), totals
        statistics = TokenMoments(*sums)
    arguments = REDUCE_ARGUMENTS.pack(
        tokens.live.data_ptr(),
        tokens.demo.data_ptr(),
        tokens.advantages.data_ptr(),
        tokens.weight.data_ptr(),
        tokens.offsets.data_ptr(),
        tokens.lengths.data_ptr(),
        tokens.rollout_lengths.data_ptr(),
        *_pointers(columns),
        *_pointers(scalars),
        *(_pointers(sums) if moments else (0, 0, 0)),
        tokens.live.numel(),
        sequences,
        tokens.mu,
        tokens.ref is not None,
    )
    library().gac_reduce(arguments)
    loss, rollout_loss, demo_loss, kl, clip_fraction = scalars
    return LossOutput(
        loss=loss,
        rollout_loss=rollout_loss,
        demo_loss=demo_loss,
        kl=kl,
        clip_fraction=clip_fraction,
        logps=terms.logps,
        entropy=terms.entropy,
        moments=statistics,
    )


def row_stats(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    softcap: float | None = None,
    more_outputs: bool = False,
) -> tuple[Tensor, ...]:
    count, names = targets.numel(), COLUMNS[2 : 8 if more_outputs else 5]
    results = {name: targets.new_empty(count, dtype=torch.float32) for name in names}
    columns = {"targets": _column(targets, torch.int64), **results}
    _run("gac_row_stats", logits, None, temperature, softcap, columns)
    return tuple(results.values())


def row_grads(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor,
    temperature: float | Tensor,
    out: Tensor,
    softcap: float | None = None,
    whole_row: bool = True,
    marks: RowMarks | None = None,
) -> None:
    floats = {"d_logps": d_logps, "d_entropy": d_entropy}
    # recomputing the sums is free while the row is in cache, and more accurate than `lse` rounded
    # to float32
    if not whole_row:
        floats |= {"lse": lse, "entropy": entropy}
    columns = {name: _column(x, torch.float32) for name, x in floats.items()}
    columns["targets"] = _column(targets, torch.int64)
    _run("gac_row_grads", logits, out, temperature, softcap, columns, marks)


def row_loss(
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    softcap: float | None = None,
    marks: RowMarks | None = None,
) -> TokenTerms:
    terms = TokenTerms._make([torch.empty_like(tokens.scale) for _ in TokenTerms._fields])
    given = {name: getattr(tokens, name) for name in ROW_COLUMNS}
    dense = {name: None if x is None else x.contiguous() for name, x in given.items()}
    columns = dense | terms._asdict()
    temperature, *options = spec.token_scalars.values()
    scaling = temperature if tokens.temperature is None else tokens.temperature
    _run("gac_row_loss", logits, out, scaling, softcap, columns, marks, options)
    return terms


def _run(
    function: str,
    logits: Tensor,
    out: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    columns: dict[str, Any],  # by the names of COLUMNS
    marks: RowMarks | None = None,
    options: Sequence[Any] = (),  # a TokenSpec
) -> None:
    """Run a function on the rows of logits, and of their gradient `out`, [B, T, V]."""
    batch, length, width = logits.shape
    rows = logits.data_ptr(), DTYPES.index(logits.dtype), *logits.stride()[:2]
    out_rows: tuple[int, ...] = (0, 0, 0, 0)
    if out is not None:
        out_rows = out.data_ptr(), DTYPES.index(out.dtype), *out.stride()[:2]
    sizes = batch * length, width, length, torch.get_num_threads()
    if isinstance(temperature, Tensor):
        columns["temperatures"], temperature = _column(temperature, torch.float32), 1.0
    columns |= {} if marks is None else marks._asdict()
    pointers = _pointers(map(columns.get, COLUMNS))
    scaling = temperature, softcap or 0.0, columns.get("eps", 0.0)
    arguments = ROW_ARGUMENTS.pack(*rows, *out_rows, *sizes, *scaling, *pointers, *options)
    getattr(library(), function)(arguments)


def _column(x: Any, dtype: torch.dtype) -> Any:
    """`x` as a contiguous tensor of `dtype`; None stays None."""
    if x is None or (x.dtype is dtype and x.is_contiguous()):
        return x
    return x.to(dtype).contiguous()


def _pointers(tensors: Iterable[Tensor | None]) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


def _raise(error: bytes | None, *_: Any) -> None:
    """Raise the error that a function of the library returned."""
    if error:
        raise RuntimeError(f"the native CPU kernels failed: {error.decode()}")
