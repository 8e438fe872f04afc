"""Row kernels in CUDA C++ for thread-block clusters, in `csrc/cuda`: backend "native" on a GPU.

A row is read once and its gradient written once; in between, the row is kept in the shared memory
of a cluster's blocks. The library is loaded with ctypes; see `gac_kernels.build_cuda`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import build_cuda, reference
from ..contract import TOKEN_OPTIONS, LossOutput, LossSpec
from ..tokens import (
    DTYPES,
    ROW_COLUMNS,
    BatchInputs,
    Scaling,
    Tokens,
    TokenTerms,
    Upstream,
)
from . import triton

_CAPABILITIES = ((9, 0), (10, 0))  # compute capabilities
_STATS, _GRADS, _LOSS = range(3)

_TILE_BYTES = 8192
_HEADER_BYTES = 1024  # barriers and sums, before the tiles
_AHEAD = 4  # tiles to prefetch while a row is kept
_RINGS = (14, 28)  # ring-buffer tiles per block with two blocks per multiprocessor, and with one


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    """Consecutive fields of the same C type, from their names separated by spaces."""
    return [(name, kind) for name in names.split()]


class Arguments(ctypes.Structure):
    """Mirrors `gac::cuda::Arguments` of csrc/cuda/arguments.h."""

    _fields_ = (
        *_fields(
            "logits out targets demo advantages old ref"
            " scale factor rollout_logps d_logps d_entropy results",
            ctypes.c_void_p,
        ),
        *_fields(
            "rows per_batch vocab batch_stride row_stride out_batch_stride out_row_stride",
            ctypes.c_int64,
        ),
        *_fields(
            "exp2_scale inverse_temperature",
            ctypes.c_float,
        ),
        ("options", ctypes.c_float * len(TOKEN_OPTIONS)),
        *_fields(
            "task dtype out_dtype cluster slots device",
            ctypes.c_int32,
        ),
    )


class Split(NamedTuple):
    """A row is split over `cluster` blocks, each with a ring buffer of `slots` tiles of 8 KiB."""

    cluster: int
    slots: int


def split(vocab: int, dtype: torch.dtype, keep_row: bool) -> Split:
    """Choose the split for rows of `vocab` logits.

    `keep_row` keeps each row in shared memory until its gradient is computed.
    Raises ValueError if no cluster can hold the row. Uses the fewest blocks that leave space to
    prefetch, with two blocks per multiprocessor if possible. For 152,064 logits on an H200, that is
    the fastest of seven splits in bfloat16, and of three in float32.
    """
    if not keep_row:
        return Split(1, _RINGS[0])
    word_width = 16 // dtype.itemsize
    words = (vocab + 2 * word_width - 2) // word_width  # for a row with any alignment
    for slots, ahead in ((_RINGS[0], _AHEAD), (_RINGS[1], _AHEAD), (_RINGS[1], 1)):
        for cluster in (1, 2, 4, 8):
            if math.ceil(math.ceil(words / cluster) * 16 / _TILE_BYTES) + ahead <= slots:
                return Split(cluster, slots)
    raise ValueError(
        f"logits have V={vocab} in {dtype}: a row must have at most {8 * 27 * _TILE_BYTES} bytes "
        "to fit in a cluster's shared memory; use backend='triton'"
    )


def shared_bytes(slots: int) -> int:
    """Shared memory of a block whose ring has `slots` tiles."""
    return _HEADER_BYTES + slots * _TILE_BYTES


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library, building it on first use.

    Raises RuntimeError or OSError with the reason if that fails.
    """
    loaded = ctypes.CDLL(str(build_cuda.build()))
    loaded.gac_cuda_rows.restype = ctypes.c_char_p
    return loaded


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"its kernels take float32, bfloat16 and float16, not {dtype}"
    if torch.version.hip:
        return "an AMD GPU has no thread-block clusters"  # some report capability 9.0, like Hopper
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability(device) not in _CAPABILITIES:
        return f"{torch.cuda.get_device_name(device)} does not have compute capability 9.0 or 10.0"
    return _library_error()


_library_error = functools.cache(lambda: build_cuda.error_of(library))  # a failed build is slow


def plan(inputs: BatchInputs, spec: LossSpec, dtype: torch.dtype = torch.float32) -> Tokens:
    return _batch_backend(inputs.targets.device).plan(inputs, spec, dtype)


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> LossOutput:
    return _batch_backend(tokens.live.device).reduce(tokens, terms, moments)


def _batch_backend(device: torch.device) -> ModuleType:
    """The backend that runs `plan`, `reduce` and `scale_`, and rows with other options."""
    return reference if triton.unavailable(device, torch.float32) else triton


def row_stats(
    logits: Tensor, targets: Tensor, scaling: Scaling, *, more_outputs: bool = False
) -> tuple[Tensor, ...]:
    temperature, softcap = scaling
    if more_outputs or softcap is not None or isinstance(temperature, Tensor):
        rows = _batch_backend(logits.device)
        return rows.row_stats(logits, targets, scaling, more_outputs=more_outputs)
    results = torch.empty(3, targets.numel(), dtype=torch.float32, device=logits.device)
    columns = {"targets": targets}
    _launch(_STATS, logits, None, temperature=temperature, results=results, columns=columns)
    return results[0], results[1], results[2]


def row_grads(
    logits: Tensor,
    targets: Tensor,
    scaling: Scaling,
    upstream: Upstream,
    out: Tensor,
    *,
    whole_row: bool = True,
) -> None:
    temperature, softcap = scaling
    if isinstance(temperature, Tensor) or softcap is not None or not whole_row:
        rows = _batch_backend(logits.device)
        rows.row_grads(logits, targets, scaling, upstream, out, whole_row=whole_row)
        return
    # the sums are recomputed from the row in shared memory, which is more accurate than `lse`
    # rounded to float32
    columns = {
        "targets": targets,
        "d_logps": upstream.d_logps,
        "d_entropy": upstream.d_entropy,
    }
    _launch(_GRADS, logits, out, temperature=temperature, results=None, columns=columns)


def row_loss(
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    *,
    softcap: float | None = None,
) -> TokenTerms:
    if softcap is not None or tokens.temperature is not None:
        rows = _batch_backend(logits.device)
        return rows.row_loss(logits, tokens, spec, out, softcap=softcap)
    results = torch.empty(5, tokens.targets.numel(), dtype=torch.float32, device=logits.device)
    columns = {name: getattr(tokens, name) for name in ROW_COLUMNS}
    _launch(
        _LOSS,
        logits,
        out,
        temperature=spec.temperature,
        results=results,
        columns=columns,
        spec=spec,
    )
    return TokenTerms(*results.unbind())


def scale_(tensor: Tensor, factor: Tensor) -> None:
    _batch_backend(tensor.device).scale_(tensor, factor)


def _launch(
    task: int,
    logits: Tensor,
    out: Tensor | None,
    *,
    temperature: float,
    results: Tensor | None,
    columns: dict[str, Any],
    spec: LossSpec | None = None,
) -> None:
    # the copies must live until the launch, not until the kernel ends: memory is reused in stream
    # order
    tensors = {name: None if x is None else x.contiguous() for name, x in columns.items()}
    tensors |= {"logits": logits, "out": out, "results": results}
    options = () if spec is None else spec.token_options.values()
    row_split = split(logits.shape[2], logits.dtype, keep_row=out is not None)
    arguments = Arguments(
        **{name: None if x is None else x.data_ptr() for name, x in tensors.items()},
        rows=logits.shape[0] * logits.shape[1],
        per_batch=max(logits.shape[1], 1),
        vocab=logits.shape[2],
        batch_stride=logits.stride(0),
        row_stride=logits.stride(1),
        out_batch_stride=0 if out is None else out.stride(0),
        out_row_stride=0 if out is None else out.stride(1),
        exp2_scale=math.log2(math.e) / temperature,
        inverse_temperature=1 / temperature,
        options=tuple(options),
        task=task,
        dtype=DTYPES.index(logits.dtype),
        out_dtype=0 if out is None else DTYPES.index(out.dtype),
        cluster=row_split.cluster,
        slots=row_split.slots,
        device=logits.device.index or 0,
    )
    _call(library().gac_cuda_rows, logits.device, ctypes.byref(arguments))


def _call(function: Any, device: torch.device, *arguments: Any) -> None:
    """Call `function` on the current stream of `device`.

    On a CPU, the library is the emulation that the tests use.
    """
    on_gpu = device.type == "cuda"
    # the library changes the current device and does not restore it
    with torch.cuda.device(device if on_gpu else -1):
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else None
        error = function(*arguments, ctypes.c_void_p(stream))
    if error:
        raise RuntimeError(f"the CUDA row kernel failed: {error.decode()}")
