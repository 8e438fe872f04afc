"""The LM head's chunked GEMMs: operands, chunk sizes, buffers, and the sums of the gradients.

The logits of a chunk are computed block by block; their gradient is stored in the operands' dtype
and passed to the two backward GEMMs at once. The backward GEMMs need many rows, because every chunk
reads and writes the whole [V, H] weight gradient. The float32 logits take more memory per row, so a
block has fewer rows than a chunk.

Notation: N tokens, V vocabulary size, H hidden size, M rows of a chunk or block.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import backends
from .contract import COMPUTE_DTYPES
from .tokens import Index, NeedsGrad, Operands, capturing

# Memory budget in bytes. With V = 152064, a GPU's budget is enough for 512 rows of logits and 2304
# rows of gradients; a GPU with less free memory gets FREE_SHARE of what it has.
CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1000 << 20}
FREE_SHARE = 3 / 4
# With fewer bytes of logits, the free memory is not asked for: the call takes microseconds.
SMALL_BYTES = 64 << 20
# Rows of a GEMM tile. On a CPU, 192 rows of Qwen2.5-0.5B's head are 5% faster than 128 rows.
ALIGN, CPU_ALIGN = 128, 16
# cuBLAS pairs the tiles of a block of logits; with 1536 rows, its GEMM is as fast as with all rows.
BLOCK_ALIGN, LARGEST_BLOCK = 256, 1536
# With at least this many elements, a weight gradient has more GEMM tiles than a GPU has
# multiprocessors, so the GEMM does not split its sums (no split-K): each float32 sum is rounded
# only once.
NO_SPLIT_K = 1 << 24


# Values of the environment variable GAC_WEIGHT_SUM.
WEIGHT_SUMS = ("float32", "bfloat16")

# Rows of a buffer start at multiples of this many elements, so that TMA and 16-byte accesses work
# for any vocabulary; the number of rows is a multiple of the second number, so that the allocator
# can reuse their memory although the number of tokens varies.
ROW_MULTIPLE = {"cuda": (64, 1024)}

P = ParamSpec("P")
R = TypeVar("R")

# Gradients of the rows, in their dtype, and of the weight [V, H] and the bias [V], in float32 or
# better (that of the weight in its own dtype if its GEMMs rounded it); None if not needed.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Result(NamedTuple):
    """What `Fused` needs of a loss."""

    outputs: tuple[Any, ...]  # the loss, and what is not differentiable
    gradients: Gradients  # of the loss, divided by `inv_scale`
    inv_scale: Tensor | None = None  # see `scale_for_float16`


# glibc returns freed blocks of this size to the system, which zeroes the pages of the next one; for
# the gradient of a weight, that takes a tenth of the time of 256 rows, and for that of given logits
# more than half. Larger blocks than the second number are not kept, nor more than KEPT_BLOCKS.
KEPT_BYTES, MOST_KEPT_BYTES, KEPT_BLOCKS = 32 << 20, 1 << 30, 2
# (use, bytes) -> the memory of the latest large tensor for it, and the owner of its storage
_kept: dict[tuple[str, int], tuple[Tensor, weakref.ref[Any]]] = {}


def empty_gradient(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate the gradient of a weight, or of given logits, by `empty_kept`."""
    return empty_kept("gradient", shape, dtype, device)


def empty_kept(
    use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate a tensor that every call needs.

    On a CPU, a large one takes the memory of the one before, if no tensor uses that any more. So
    the memory of one gradient and one buffer stays allocated between calls. The storage cannot be
    resized.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not KEPT_BYTES <= size <= MOST_KEPT_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    # in one step: no other thread gets it too
    memory, used_by = _kept.pop((use, size), (None, None))
    for other in list(_kept):
        if other[0] == use or len(_kept) >= KEPT_BLOCKS:
            _kept.pop(other, None)
    if memory is None or used_by is None or used_by() is not None:
        memory = torch.empty(size, dtype=torch.uint8)
    # the storage of the result keeps its owner alive, and the owner keeps the memory alive
    owner = (ctypes.c_char * size).from_address(memory.data_ptr())
    vars(owner)["memory"] = memory
    _kept[use, size] = memory, weakref.ref(owner)
    # not a view: autograd adds the other gradient of a tied weight in place only to whole storages
    return torch.frombuffer(owner, dtype=dtype).resize_(shape)


class Buffer:
    """A reusable [M, V] buffer that grows to the largest request."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width, self.dtype, self.device = width, dtype, device
        self.multiples = ROW_MULTIPLE.get(device.type, (1, 1))
        self.storage: Tensor | None = None

    def rows(self, count: int, limit: int) -> Tensor:
        """`count` rows of the buffer; it gets at most `limit` >= `count` rows."""
        if self.storage is None or len(self.storage) < count:
            self.storage = None  # free it first: old and new together would exceed the budget
            columns, rows = self.multiples
            size = min(_round_up(count, rows), limit), _round_up(self.width, columns)
            self.storage = empty_kept("logits", size, self.dtype, self.device)
        return self.storage[:count, : self.width]


class Projection:
    """weight [V, H] and bias [V] as GEMM operands, and the buffers shared by all chunks.

    Operands are rounded to `dtype`, as under autocast. On CUDA they are multiplied in that dtype
    with float32 output; the CPU has no such GEMM and multiplies float32 copies (the weight is
    copied once).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        chunk_bytes: int | None = None,  # memory for logits and gradients; None: CHUNK_BYTES
        vocab_size: int | None = None,  # determines the chunk sizes; None: rows of the weight
        *,
        free: int | None = None,  # bytes that may be allocated; None: enough
        sums: bool = True,  # whether the gradient of the weight takes some of them
        stores_logits: bool = True,  # or only what has the size of their gradient
    ) -> None:
        self.dtype, self.accum_dtype = dtype, COMPUTE_DTYPES[dtype]
        self.gemm_dtype = operand_dtype(weight.device, dtype)
        self.weight = self.operand(weight)
        self.bias = None if bias is None else bias.to(self.dtype).to(self.accum_dtype)
        self.stores_logits = stores_logits
        processors = multiprocessors(weight.device)
        self.equal_spans = processors == 1
        vocab_size = vocab_size or weight.shape[0]
        weight_size = vocab_size * weight.shape[1]
        # float16 gradients are still scaled (`tokens.scale_for_float16`) and remain in float32
        halves = self.gemm_dtype == weight.dtype == torch.bfloat16
        self.writes_rounded = halves and weight_size >= NO_SPLIT_K
        rounds_sums = sums_are_rounded()
        if rounds_sums and not self.writes_rounded and weight_size >= NO_SPLIT_K:
            backends.warn_once(
                "GAC_WEIGHT_SUM=bfloat16 has no effect here: it needs a bfloat16 weight, and GEMMs "
                "in bfloat16 on a GPU; using float32"
            )
        rounds_sums &= self.writes_rounded
        self.sum_dtype = weight.dtype if rounds_sums else self.accum_dtype
        budget = chunk_bytes or default_budget(weight.device.type)
        if chunk_bytes is None and free is not None:
            taken = self.sum_dtype.itemsize * weight_size if sums else 0
            share = int(FREE_SHARE * (free - taken))
            budget = max(min(budget, share), smallest_budget(vocab_size, dtype))
        logit_bytes = self.accum_dtype.itemsize if stores_logits else 0
        sizes = (
            vocab_size,
            weight.shape[1],
            (logit_bytes, self.gemm_dtype.itemsize),
            processors,
        )
        self.chunk, self.block = chunk_sizes(budget, *sizes)
        self._largest_chunk = self.chunk
        if chunk_bytes is None and self.writes_rounded and not rounds_sums and stores_logits:
            budget += self.accum_dtype.itemsize * weight_size
            self._largest_chunk = chunk_sizes(budget, *sizes, self.block)[0]
        self._logits = Buffer(weight.shape[0], self.accum_dtype, weight.device)
        gradient = Buffer(weight.shape[0], self.gemm_dtype, weight.device)
        self._gradient = gradient if self.rounds else self._logits

    @property
    def rounds(self) -> bool:
        """Whether the gradient of the logits is rounded to the operands' dtype for the GEMMs."""
        return self.gemm_dtype != self.accum_dtype

    def chunk_rows(self, count: int, weight_gradient: bool) -> int:
        """Number of rows in each chunk when `count` rows are split into chunks.

        Several chunks of a head with logits need a float32 buffer to sum the gradient of the
        weight. A single chunk does not, and may use that memory for more rows.
        """
        single = weight_gradient and self.chunk < count <= self._largest_chunk
        return count if single else self.chunk

    def reserve(self, rows: int) -> None:
        """Allocate the logits of a block at once, so that a larger block never replaces it."""
        if self.stores_logits:
            self._logits.rows(min(rows, self.block), self.block)

    def spans(self, start: int, stop: int, rows: int) -> Iterator[slice]:
        """Split [start, stop) into chunks or blocks of at most `rows`."""
        return spans(start, stop, rows, equal=self.equal_spans)

    def operand(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.gemm_dtype)

    def gradient(self, count: int) -> Tensor:
        """Buffer [M, V] for the gradient of a chunk's logits, in the operands' dtype."""
        return self._gradient.rows(
            count, self.chunk if count <= self.chunk else self._largest_chunk
        )

    def logits(self, rows: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Project rows [M, H] to logits [M, V] in float32 or better; the next call overwrites them.

        `gradient` is the buffer [M, V] for their gradient. Without rounding, the logits are written
        there.
        """
        out = gradient
        if out is None or self.rounds:
            out = self._logits.rows(len(rows), self.block)
        multiply(rows, self.weight.T, out)
        return out if self.bias is None else out.add_(self.bias)

    def hidden_gradient(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the gradient [M, H] of the hidden rows from the logits' `gradient` [M, V].

        The result is in float32 or better: with bfloat16 output, a GEMM may also round partial sums
        (split-K) and lose precision over the long sum. With rounding, the result reuses the logits
        buffer if it is large enough; the logits are no longer needed.

        out: where it is written, if given.
        """
        shape = len(gradient), self.weight.shape[1]
        storage = self._logits.storage if self.rounds else None
        if out is None and storage is not None and storage.numel() >= math.prod(shape):
            out = storage.view(-1)[: math.prod(shape)].view(shape)
        elif out is None:
            out = torch.empty(shape, dtype=self.accum_dtype, device=gradient.device)
        multiply(gradient, self.weight, out)
        return out

    def release(self) -> None:
        """Free the buffers."""
        self._logits.storage = self._gradient.storage = None


class Head:
    """The head of one call: the logits of its rows, and the gradients of its operands."""

    stores_logits = True

    def __init__(self, op: Operands, needs: NeedsGrad) -> None:
        assert op.weight is not None
        self.hidden, self.needs = op.rows, needs
        self.projection = Projection(
            op.weight,
            op.bias,
            op.dtype,
            op.chunk_bytes,
            op.vocab_size,
            free=_free_for(op),
            sums=needs.weight,
            stores_logits=self.stores_logits,
        )
        # allocated by the first chunk
        self._d_hidden: Tensor | None = None
        self._d_weight: Tensor | None = None
        width = len(op.weight) if needs.bias else 0
        self._d_bias = self.projection.weight.new_zeros(width, dtype=self.projection.accum_dtype)

    def gather(self, index: Index, live: Tensor | None) -> Tensor:
        """The rows of hidden as a GEMM operand [M, H]; a view if `index` is a slice.

        Rows that are not `live` [N] are zeros: a row without a loss may hold nan, which would add
        0 * nan to the weight's gradient.
        """
        if isinstance(index, Tensor):
            rows = self.hidden.index_select(0, index)
        else:
            rows = self.hidden[index]
        rows = self.projection.operand(rows)
        if live is None or not self.needs.weight:
            return rows
        return torch.where(live[index, None], rows, 0)

    def logits(self, rows: Tensor, index: Index, out: Tensor | None) -> Any:
        """The logits [1, M, V] of rows [M, H] of the tokens at `index`.

        out: the buffer [M, V] for their gradient, if they have one.
        """
        return self.projection.logits(rows, out)[None]

    def add(self, index: Index, rows: Tensor, grad: Tensor, *, single_chunk: bool) -> None:
        """Add a chunk: token indices [M], input rows [M, H] and the logits' gradient [M, V]."""
        if self.needs.weight:
            self.add_weight(rows, grad, single_chunk=single_chunk)
        if self.needs.bias:
            self._d_bias += grad.sum(0, dtype=self.projection.accum_dtype)
        if self.needs.rows:
            self.add_hidden(index, grad)

    def add_weight(self, rows: Tensor, grad: Tensor, *, single_chunk: bool) -> None:
        """Add rows [M, H] with the logits' gradient [M, V] to the gradient of the weight."""
        first = self._d_weight is None
        if self._d_weight is None:
            self._d_weight = self._allocate(single_chunk)
        multiply(grad.T, rows, self._d_weight, accumulate=not first)

    def add_hidden(self, index: Index, grad: Tensor, factors: Tensor | None = None) -> None:
        """Store the gradient of a chunk's rows, from that of their logits; times `factors` [M, 1].

        If one chunk is a slice, all are, and they cover all rows.
        """
        if self._d_hidden is None:
            self._d_hidden = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
            if isinstance(index, Tensor):  # for rows that have no gradient
                self._d_hidden.zero_()
        part = None if isinstance(index, Tensor) else self._d_hidden[index]
        direct = part is not None and part.dtype == self.projection.accum_dtype
        d_rows = self.projection.hidden_gradient(grad, part if direct else None)
        if factors is not None:
            d_rows.mul_(factors)
        if isinstance(index, Tensor):
            self._d_hidden.index_copy_(0, index, d_rows.to(self._d_hidden.dtype))
        elif not direct:
            self._d_hidden[index] = d_rows

    def rescale(self, factor: Tensor, grad: Tensor | None) -> None:
        """Multiply all gradients so far, with that of a chunk's first logits, by a factor."""
        for x in (self._d_hidden, self._d_weight, self._d_bias, grad):
            if x is not None:
                x.mul_(factor)

    def gradients(self) -> Gradients:
        """Free the buffers and return the gradients of hidden, weight and bias."""
        self.projection.release()  # first: rounding the sums needs memory too
        if self.needs.weight and self._d_weight is None:
            self._d_weight = self._allocate(single_chunk=False).zero_()
        if self.needs.rows and self._d_hidden is None:
            self._d_hidden = torch.zeros_like(self.hidden, memory_format=torch.contiguous_format)
        return self._d_hidden, self._d_weight, self._d_bias if self.needs.bias else None

    def _allocate(self, single_chunk: bool) -> Tensor:
        """Allocate the weight's gradient [V, H]."""
        head = self.projection
        rounded = single_chunk and head.writes_rounded
        dtype = torch.bfloat16 if rounded else head.sum_dtype
        return empty_gradient(head.weight.shape, dtype, head.weight.device)


def _free_for(op: Operands) -> int | None:
    """The free memory for a call's buffers and the gradient of its weight; None: enough.

    Ranks that share the vocabulary need the same chunks, whatever their memory.
    """
    device, weight = op.rows.device, op.weight
    assert weight is not None
    small = op.rows.shape[0] * weight.shape[0] * 4 <= SMALL_BYTES
    fixed = op.chunk_bytes is not None or op.vocab_size is not None
    if device.type != "cuda" or small or fixed or capturing(device):
        return None
    return free_memory(device, int(CHUNK_BYTES["cuda"] / FREE_SHARE) + 4 * weight.numel())


def in_smaller_chunks(function: Callable[Concatenate[Operands, P], R]) -> Callable[..., R]:
    """Make a function of `Operands` try again with half the memory when an allocation fails.

    Ranks that share the vocabulary cannot: they would need to fail together.
    """

    @functools.wraps(function)
    def tried(op: Operands, *arguments: P.args, **keywords: P.kwargs) -> R:
        weight = op.weight
        if weight is None or op.vocab_size is not None:
            return function(op, *arguments, **keywords)
        budget = op.chunk_bytes or default_budget(op.rows.device.type)
        smallest = smallest_budget(weight.shape[0], op.dtype)
        while True:
            try:
                return function(op, *arguments, **keywords)
            except torch.OutOfMemoryError:
                budget //= 2
                if budget < smallest:
                    raise
            # here, because an exception that is being handled keeps the buffers alive
            warnings.warn(
                f"out of memory: trying again with chunk_bytes={budget}; pass it, or free memory, "
                "to save the first attempt",
                RuntimeWarning,
                stacklevel=2,
            )
            op = replace(op, chunk_bytes=budget)

    return tried


def compact(
    nonzero: Tensor, index: Tensor, rows: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the rows of a chunk that have a gradient, moving as few rows of `grad` as possible.

    Reads their number: the host waits for the chunk's row kernels, but not for its backward GEMMs.
    """
    count = int(nonzero.sum())
    if count == len(index):
        return index, rows, grad
    # the last rows with a gradient fill the gaps among the first `count` rows
    kept = (~nonzero).to(torch.int8).argsort(stable=True)[:count]
    gaps = (~nonzero[:count]).nonzero().squeeze(1)
    sources = kept[count - len(gaps) :]
    for i in range(0, len(gaps), step := max(len(grad) // 16, 1)):
        grad.index_copy_(0, gaps[i : i + step], grad.index_select(0, sources[i : i + step]))
    kept = torch.arange(count, device=index.device).index_copy_(0, gaps, sources)
    return index[kept], rows[kept], grad[:count]


def spans(start: int, stop: int, rows: int, *, equal: bool) -> Iterator[slice]:
    """Split [start, stop) into slices of `rows`, the last of which takes the remainder.

    equal: into as many slices of nearly equal size, longest first. On a GPU, a size chosen to fill
    whole waves would be lost.
    """
    tile = (math.gcd(rows, ALIGN) if rows >= ALIGN else 1) if equal else rows
    for left in range(math.ceil((stop - start) / rows), 0, -1):
        size = min(math.ceil((stop - start) / (left * tile)) * tile, stop - start)
        yield slice(start, start + size)
        start += size


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; 1 for other devices."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def free_memory(device: torch.device, enough: int) -> int:
    """Bytes that may be allocated on a GPU, or at least `enough`."""
    free = torch.cuda.mem_get_info(device)[0]
    if free < enough:  # the allocator also keeps memory that no tensor uses
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free


def sums_are_rounded() -> bool:
    """Whether the gradient of a large bfloat16 weight is summed in bfloat16: GAC_WEIGHT_SUM.

    That takes no memory beside the result, but each chunk rounds it (research/rounded_sums.md).

    Raises:
        ValueError: the environment variable names another dtype.
    """
    requested = os.environ.get("GAC_WEIGHT_SUM", "float32")
    if requested not in WEIGHT_SUMS:
        raise ValueError(f"GAC_WEIGHT_SUM={requested}: use one of {', '.join(WEIGHT_SUMS)}")
    return requested == "bfloat16"


def default_budget(kind: str) -> int:
    """`CHUNK_BYTES` of a device type."""
    return CHUNK_BYTES.get(kind, CHUNK_BYTES["cuda"])


def smallest_budget(vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes of a tile of rows of logits and their gradient: fewer rows would take too long."""
    return ALIGN * vocab_size * (COMPUTE_DTYPES[dtype].itemsize + dtype.itemsize)


def chunk_sizes(
    budget: int,  # bytes
    vocab_size: int,
    width: int,  # H
    item_bytes: tuple[int, int],  # of a logit, and of its gradient as a GEMM operand
    processors: int,
    block: int | None = None,
) -> tuple[int, int]:
    """Choose the rows per chunk and the rows per block (unless given) for a memory budget.

    Without rounding, the gradient overwrites the logits, so a chunk is a single block. With
    rounding, the budget also includes the rows of hidden and their gradient, because a small
    vocabulary has long chunks. Without logits (0 bytes), a chunk is a single block, too.
    """
    logit_bytes, gradient_bytes = item_bytes
    chunk_row_bytes = gradient_bytes * (vocab_size + 2 * width)
    if logit_bytes == 0:
        # and the float32 gradient of the rows of hidden
        rows = _whole_tiles(budget // (chunk_row_bytes + 4 * width), BLOCK_ALIGN)
        chunk = max(whole_waves(rows, width, processors), 1)
        return chunk, block or chunk
    row_bytes = logit_bytes * vocab_size
    if logit_bytes == gradient_bytes:
        rows = budget // row_bytes
        # On a CPU, more than 512 rows are no faster: save up to half of the memory.
        cpu_rows = min(rows, max(rows // 2, 512))
        rows = _whole_tiles(rows, ALIGN) if processors > 1 else _whole_tiles(cpu_rows, CPU_ALIGN)
        return rows, rows
    # about 2 rows of logits for 9 rows of gradients
    block = block or min(_whole_tiles(4 * budget // (13 * row_bytes), BLOCK_ALIGN), LARGEST_BLOCK)
    chunk = max(_whole_tiles((budget - block * row_bytes) // chunk_row_bytes), block)
    return max(whole_waves(chunk, width, processors), block), block


def whole_waves(rows: int, width: int, processors: int) -> int:
    """At most `rows`, so that a GEMM with output [rows, width] leaves few multiprocessors idle.

    Its tiles of 128 x 256 run in waves of one per multiprocessor, and the last wave is often
    partly empty. The result is at least 3/4 of `rows`.
    """
    columns = math.ceil(width / 256)

    def busy(count: int) -> float:
        waves = count // ALIGN * columns / processors
        return waves / math.ceil(waves)

    sizes = range(rows, max(rows * 3 // 4, ALIGN) - 1, -ALIGN)
    return max(sizes, key=busy, default=rows)


def _whole_tiles(rows: int, tile: int = ALIGN) -> int:
    """Round down to whole GEMM tiles; keep a number below one tile, but return at least 1."""
    return max(rows // tile * tile, min(rows, tile), 1)


def operand_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the GEMM operands: half precision only if a GEMM can output float32."""
    half = device.type == "cuda" and has_float32_output(device, dtype)
    return dtype if half else COMPUTE_DTYPES[dtype]


@functools.cache
def has_float32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether GEMMs of this dtype can output float32.

    CPU GEMMs cannot, nor can those of some PyTorch builds for AMD GPUs: their operands are copied
    to float32, with a warning. Other errors, such as a lack of memory, are not caught.
    """
    operand = torch.ones(16, 16, dtype=dtype, device=device)
    out = torch.zeros(16, 16, dtype=COMPUTE_DTYPES[dtype], device=device)
    try:
        multiply(operand, operand, out)
        multiply(operand, operand, out, accumulate=True)
    except (NotImplementedError, TypeError) as error:
        warnings.warn(
            f"this build of PyTorch has no GEMM with {dtype} operands and float32 output on "
            f"{device}, so operands are copied to float32, which is several times slower "
            f"({str(error).split('.')[0]})",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """Compute out = a @ b, or out += a @ b if `accumulate`; sums are in out's dtype."""
    if a.dtype == out.dtype:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out.dtype, out=out)
    else:
        torch.mm(a, b, out.dtype, out=out)
