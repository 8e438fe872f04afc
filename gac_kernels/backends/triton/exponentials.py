"""The epilogue head: the logits' GEMM stores exponentials instead of logits.

Row i has a reference c_i, the target's logit. The GEMM's epilogue turns each logit z into
e = 2^(z - c_i), stores it in bfloat16, and adds it up in float32: no logit reaches memory, and no
kernel reads the [M, V] matrix before the backward GEMMs do. With the mass S_i = sum e, the gradient
of a log-prob in the logits is a multiple of the row of exponentials, except at the target:

    dz_ij = s_i e_ij    with    s_i = -d_logp_i / (temperature_i S_i),    e_iy = -(S_i - e_iy)

so `finish` writes one entry and one factor per row, and the backward GEMMs multiply E. Any
reference keeps bfloat16, with the exponents of float32, from overflowing if it is within 55 nats of
the maximum; `guard_kernel` computes other rows again.

Exponents are base 2: z is the capped logit times log2(e) / temperature.
Notation: M rows, V vocabulary size, H hidden size, T tiles of columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...tokens import Scaling, Upstream
from . import launch
from .loss import k3_estimate
from .softmax import FLOOR, LN2, NO_LOSS, cap, row_scaling, write_zeros

# A row is computed again if its mass is not between these: the reference is then 55 nats from the
# maximum, and its exponentials or its factor leave the range in which bfloat16 is precise.
LARGEST_BITS = tl.constexpr(80.0)
LARGEST, SMALLEST = tl.constexpr(2.0**80), tl.constexpr(2.0**-80)


# The sums of an `Exponentials`, [M].
PER_ROW = ("reference", "target", "rest", "mass", "logps", "entropy", "lse")


class Exponentials(NamedTuple):
    """Rows of exponentials, and their sums; float32 [M] unless noted."""

    values: Tensor | None  # bfloat16 [M, V]; None: only the sums are needed
    reference: Tensor  # c, in bits
    target: Tensor  # the target's z - c, in bits; nan if the target is outside [0, V)
    rest: Tensor  # the sum of the exponentials of the other entries
    mass: Tensor  # the sum of all
    logps: Tensor
    entropy: Tensor
    lse: Tensor
    tokens: Tensor | None  # int64 [M]: the rows' tokens; None: consecutive ones
    # what the rows of the tokens are multiplied by, once `finish` has stored it: [N], or [M] of
    # consecutive tokens
    factors: Tensor
    stride: int  # elements from one of `rest`, `mass`, `logps`, `entropy` and `lse` to the next

    def part(self, start: int, stop: int) -> Exponentials:
        """Consecutive rows, which share the memory of these."""
        span = slice(start, stop)
        vectors = {name: getattr(self, name)[span] for name in PER_ROW}
        return self._replace(
            values=None if self.values is None else self.values[span],
            tokens=None if self.tokens is None else self.tokens[span],
            factors=self.factors if self.tokens is not None else self.factors[span],
            **vectors,
        )


class Tiles(NamedTuple):
    """The tiles of the GEMM, and of the kernels that follow it."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    group: int = 8  # tiles of rows that use a tile of the weight one after the other
    warps: int = 8
    block: int = 4096  # entries of a row, or of a hidden state, that a program reads at once


TILES = Tiles()


@triton.jit(do_not_specialize_on_alignment=["targets", "reference", "temperatures"])
def reference_kernel(
    rows,  # bfloat16 [M, H]
    weight,  # bfloat16 [V, H]
    bias,  # float32 [V] or None
    targets,  # int64 [M]
    reference,  # float32 [M]
    temperatures,  # float32 [M], or None: that of exp2_scale
    exp2_scale,
    softcap,  # or None
    V,
    H,
    stride_x: tl.int64,
    stride_w: tl.int64,
    BLOCK: tl.constexpr,
):
    """The scaled logit of the target in bits; 0 if it is infinite or the target outside [0, V)."""
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    inside = (y >= 0) & (y < V)
    y = tl.where(inside, y, 0)
    exp2_scale, _ = row_scaling(temperatures, n, exp2_scale, 1.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(rows + n * stride_x + k, mask=k < H, other=0.0).to(tl.float32)
        w = tl.load(weight + y * stride_w + k, mask=k < H, other=0.0).to(tl.float32)
        total += x * w
    logit = tl.sum(total, 0)
    if bias is not None:
        logit += tl.load(bias + y)
    z = cap(logit, softcap) * exp2_scale
    tl.store(reference + n, tl.where(inside & (tl.abs(z) != float("inf")), z, 0.0))


@triton.jit
def exponentials_tile(z, columns, V, bias, scale, reference, softcap):
    """2^(z scale - c) of a tile of logits, 0 outside the vocabulary; what is stored; exponents."""
    if bias is not None:
        z += tl.load(bias + columns, mask=columns < V, other=0.0)[None, :]
    z = cap(z, softcap)
    bits = z * scale[:, None] - reference[:, None]
    e = tl.where((columns < V)[None, :], tl.exp2(bits), 0.0)
    stored = e
    if softcap is not None:  # the derivative of the cap
        share = z * (1.0 / softcap)
        stored *= tl.where(tl.abs(share) == float("inf"), 0.0, 1.0 - share * share)
    return e, stored, bits


@triton.jit
def halves(tile):
    """The left and the right half of a tile."""
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def write_part(z, values, target, n, i, j, y, hit, M, V, bias, scale, c, softcap):
    """Write the exponentials of rows n, from row i and column j on; `hit`: it may have targets.

    Returns the sum of those that are not the target's, and the sum of them times their exponents.
    """
    columns = j + tl.arange(0, z.shape[1])
    e, stored, bits = exponentials_tile(z, columns, V, bias, scale, c, softcap)
    if values is not None:
        values.store([i, j], stored.to(tl.bfloat16))
    if hit:
        at_target = columns[None, :] == y[:, None]
        here = (y >= j) & (y < j + z.shape[1]) & (y < V) & (n < M)
        tl.store(target + n, tl.sum(tl.where(at_target, bits, 0.0), 1), mask=here)
        e = tl.where(at_target, 0.0, e)
    return tl.sum(e, 1), tl.sum(e * tl.maximum(bits, FLOOR), 1)


@triton.jit(
    do_not_specialize=["M"],
    do_not_specialize_on_alignment=[
        "targets",
        "reference",
        "temperatures",
        "rest",
        "moment",
        "target",
    ],
)
def exponentials_kernel(
    rows,  # descriptor of bfloat16 [M, H]
    weight,  # descriptor of bfloat16 [V, H]
    values,  # descriptor of bfloat16 [M, V] with quarter tiles; None: only the sums
    bias,  # float32 [V] or None
    targets,  # int64 [M]
    reference,  # float32 [M]
    rest,  # float32 [T, M]: sum of a tile's exponentials other than the target's
    moment,  # float32 [T, M]: sum of those times their exponents
    target,  # float32 [M]: the target's exponent
    temperatures,  # float32 [M], or None: that of exp2_scale
    exp2_scale,
    softcap,  # or None
    M,
    V,
    H,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """A persistent GEMM whose epilogue writes exponentials and their sums."""
    down = tl.cdiv(M, ROWS)
    across = tl.cdiv(V, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        group = tile // (GROUP * across)
        size = min(down - group * GROUP, GROUP)
        i = group * GROUP + tile % size
        j = (tile % (GROUP * across)) // size
        logits = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(tl.cdiv(H, DEPTH)):
            x = rows.load([i * ROWS, k * DEPTH])
            w = weight.load([j * COLUMNS, k * DEPTH])
            logits = tl.dot(x, w.T, logits)
        n = i * ROWS + tl.arange(0, ROWS)
        live = n < M
        c = tl.load(reference + n, mask=live, other=0.0)
        y = tl.load(targets + n, mask=live, other=-1)
        scale = tl.full([ROWS], 1.0, tl.float32) * exp2_scale
        if temperatures is not None:
            scale /= tl.load(temperatures + n, mask=live, other=1.0)
        hit = tl.max(((y >= j * COLUMNS) & (y < (j + 1) * COLUMNS)).to(tl.int32), 0) > 0
        # the parts of a tile take few registers, and little shared memory on their way to memory
        left, right = halves(logits)
        first, second = halves(left)
        third, fourth = halves(right)
        total = tl.zeros([ROWS], tl.float32)
        moments = tl.zeros([ROWS], tl.float32)
        for part in tl.static_range(4):
            if part == 0:
                z = first
            elif part == 1:
                z = second
            elif part == 2:
                z = third
            else:
                z = fourth
            mass, part_moment = write_part(
                z=z,
                values=values,
                target=target,
                n=n,
                i=i * ROWS,
                j=j * COLUMNS + part * (COLUMNS // 4),
                y=y,
                hit=hit,
                M=M,
                V=V,
                bias=bias,
                scale=scale,
                c=c,
                softcap=softcap,
            )
            total += mass
            moments += part_moment
        place = j.to(tl.int64) * M + n
        tl.store(rest + place, total, mask=live)
        tl.store(moment + place, moments, mask=live)


@triton.jit
def store_results(results, n, M, mask, y, V, rest, moment, bits, c):
    """Compute and store the fields of `Exponentials` from `rest` on; 0 where there is no loss.

    rest, moment: the sums without the target y, whose exponent is `bits`.
    """
    inside = (y >= 0) & (y < V)
    e = tl.where(inside, tl.exp2(bits), 0.0)
    mass = rest + e
    moment += tl.where(inside, e * tl.maximum(bits, FLOOR), 0.0)
    log2_mass = tl.log2(mass)
    logp = (bits - log2_mass) * LN2
    logp = tl.where(logp > 0.0, 0.0, logp)  # by rounding
    lost = y == NO_LOSS
    tl.store(results + n, rest, mask=mask)
    tl.store(results + M + n, mass, mask=mask)
    tl.store(results + 2 * M + n, tl.where(lost, 0.0, logp), mask=mask)
    entropy = (log2_mass - moment / mass) * LN2
    tl.store(results + 3 * M + n, tl.where(lost, 0.0, entropy), mask=mask)
    tl.store(results + 4 * M + n, tl.where(lost, 0.0, (c + log2_mass) * LN2), mask=mask)


@triton.jit(
    do_not_specialize=["M", "T", "V"],
    do_not_specialize_on_alignment=["targets", "reference", "target", "rest", "moment", "results"],
)
def sums_kernel(
    targets,  # int64 [M]
    reference,  # float32 [M]
    target,  # float32 [M]
    rest,  # float32 [T, M]
    moment,  # float32 [T, M]
    results,  # float32 [5, M]: see `store_results`
    M,
    T,
    V,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Add up the tiles of ROWS rows in a fixed order."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = n < M
    total = tl.zeros([ROWS], tl.float32)
    moments = tl.zeros([ROWS], tl.float32)
    for start in range(0, T, DEPTH):
        tile = (start + tl.arange(0, DEPTH)).to(tl.int64)
        place = tile[:, None] * M + n[None, :]
        mask = (tile < T)[:, None] & live[None, :]
        total += tl.sum(tl.load(rest + place, mask=mask, other=0.0), 0)
        moments += tl.sum(tl.load(moment + place, mask=mask, other=0.0), 0)
    y = tl.load(targets + n, mask=live, other=NO_LOSS)
    bits = tl.load(target + n, mask=live, other=0.0)
    c = tl.load(reference + n, mask=live, other=0.0)
    store_results(results, n, M, live, y, V, total, moments, bits, c)


@triton.jit
def row_logits(row, weight, columns, V, H, stride_w, DEPTH: tl.constexpr):
    """The logits of a hidden state at `columns`, without a bias; 0 outside the vocabulary."""
    z = tl.zeros(columns.shape, tl.float32)
    for start in range(0, H, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(row + k, mask=k < H, other=0.0).to(tl.float32)
        mask = (columns < V)[:, None] & (k < H)[None, :]
        place = columns.to(tl.int64)[:, None] * stride_w + k[None, :]
        z += tl.sum(tl.load(weight + place, mask=mask, other=0.0).to(tl.float32) * x[None, :], 1)
    return z


@triton.jit(
    do_not_specialize=["M", "V", "H"],
    do_not_specialize_on_alignment=["targets", "reference", "target", "results", "temperatures"],
)
def guard_kernel(
    rows,  # bfloat16 [M, H]
    weight,  # bfloat16 [V, H]
    values,  # bfloat16 [M, V], or None
    bias,  # float32 [V] or None
    targets,  # int64 [M]
    reference,  # float32 [M]
    target,  # float32 [M]
    results,  # float32 [5, M]
    temperatures,  # float32 [M], or None: that of exp2_scale
    exp2_scale,
    softcap,  # or None
    M,
    V,
    H,
    stride_x: tl.int64,
    stride_w: tl.int64,
    stride_e: tl.int64,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a row again, relative to its maximum, if its mass is out of range.

    One program per row: slow, but no trained model's target is 55 nats below its likeliest token.
    """
    n = tl.program_id(0).to(tl.int64)
    mass = tl.load(results + M + n)
    if (mass > LARGEST) | (mass < SMALLEST):
        y = tl.load(targets + n)
        row = rows + n * stride_x
        exp2_scale = row_scaling(temperatures, n, exp2_scale, 1.0)[0]
        scale = tl.full([1], 1.0, tl.float32) * exp2_scale
        none = tl.zeros([1], tl.float32)
        top = tl.full([COLUMNS], float("-inf"), tl.float32)
        for start in range(0, V, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            z = row_logits(row, weight, columns, V, H, stride_w, DEPTH)
            bits = exponentials_tile(z[None, :], columns, V, bias, scale, none, softcap)[2]
            bits = tl.where(columns < V, tl.reshape(bits, [COLUMNS]), float("-inf"))
            top = tl.maximum(top, bits)
        c = tl.max(top, 0)
        c = tl.where(tl.abs(c) == float("inf"), 0.0, c)
        rest = 0.0
        moment = 0.0
        found = float("nan")
        for start in range(0, V, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            z = row_logits(row, weight, columns, V, H, stride_w, DEPTH)
            e, stored, bits = exponentials_tile(
                z[None, :], columns, V, bias, scale, none + c, softcap
            )
            e = tl.reshape(e, [COLUMNS])
            bits = tl.reshape(bits, [COLUMNS])
            if values is not None:
                stored = tl.reshape(stored, [COLUMNS]).to(tl.bfloat16)
                tl.store(values + n * stride_e + columns, stored, mask=columns < V)
            hit = columns == y
            if (y >= start) & (y < start + COLUMNS) & (y < V):
                found = tl.sum(tl.where(hit, bits, 0.0), 0)
            e = tl.where(hit, 0.0, e)
            rest += tl.sum(e, 0)
            moment += tl.sum(e * tl.maximum(bits, FLOOR), 0)
        rest = tl.where(rest == float("inf"), float("nan"), rest)  # an infinite logit
        tl.store(reference + n, c)
        tl.store(target + n, found)
        store_results(results, n, M, y == y, y, V, rest, moment, found, c)


@triton.jit(
    do_not_specialize=["stride_r", "V"],
    do_not_specialize_on_alignment=["targets", "reference", "target", "results", "entropy", "lse"],
)
def widen_kernel(
    values,  # bfloat16 [M, V]
    targets,  # int64 [M]
    reference,  # float32 [M]
    target,  # float32 [M]
    results,  # float32 [5, M], rows `stride_r` apart: see `store_results`
    entropy,  # float32 [M]
    lse,  # float32 [M]
    stride_r,
    V,
    stride_e: tl.int64,
    BLOCK: tl.constexpr,
):
    """Make the sums of a row, whose columns are a part of the vocabulary, those of the whole row.

    If the whole mass is out of range, the row gets the whole logsumexp as its reference.
    """
    n = tl.program_id(0).to(tl.int64)
    if tl.load(targets + n) != NO_LOSS:
        c = tl.load(reference + n)
        bits = tl.load(target + n)
        log2_mass = tl.load(lse + n) / LN2 - c
        if log2_mass > LARGEST_BITS:
            row = values + n * stride_e
            for start in range(0, V, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                e = tl.load(row + columns, mask=columns < V, other=0.0).to(tl.float32)
                e *= tl.exp2(-log2_mass)
                tl.store(row + columns, e.to(tl.bfloat16), mask=columns < V)
            tl.store(reference + n, c + log2_mass)
            bits -= log2_mass
            tl.store(target + n, bits)
            log2_mass = 0.0
        mass = tl.exp2(log2_mass)
        logp = (bits - log2_mass) * LN2
        logp = tl.where(logp > 0.0, 0.0, logp)  # by rounding
        tl.store(results + n, mass * k3_estimate(logp)[1])
        tl.store(results + stride_r + n, mass)
        tl.store(results + 2 * stride_r + n, logp)
        tl.store(results + 3 * stride_r + n, tl.load(entropy + n))


@triton.jit(
    do_not_specialize=["stride_r", "V"],
    do_not_specialize_on_alignment=[
        "tokens",
        "factors",
        "targets",
        "reference",
        "target",
        "results",
        "d_logps",
        "d_entropy",
        "temperatures",
    ],
)
def finish_kernel(
    values,  # bfloat16 [M, V]
    tokens,  # int64 [M]: where the factors are stored; None: one after the other
    factors,  # float32 [N], or [M]
    targets,  # int64 [M]
    reference,  # float32 [M]
    target,  # float32 [M]
    results,  # float32 [5, M], rows `stride_r` apart
    d_logps,  # float32 [M]
    d_entropy,  # float32 [M]
    temperatures,  # float32 [M], or None: those of the next two arguments
    exp2_scale,
    inverse_temperature,
    softcap,  # or None
    stride_r,
    V,
    stride_e: tl.int64,
    BLOCK: tl.constexpr,
):
    """Make a row of exponentials, times its factor, the gradient of its logits."""
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    d_logp = tl.load(d_logps + n)
    d_h = tl.load(d_entropy + n)
    mass = tl.load(results + stride_r + n)
    row = values + n * stride_e
    unit = tl.where(d_h == 0, d_logp, tl.maximum(tl.abs(d_logp), tl.abs(d_h)))
    factor = 0.0
    if (y != NO_LOSS) & (unit != 0):
        exp2_scale, inverse_temperature = row_scaling(
            temperatures, n, exp2_scale, inverse_temperature
        )
        factor = -unit * inverse_temperature / mass
        on_logp = tl.where(d_h == 0, 1.0, d_logp / unit)
        on_entropy = tl.where(d_h == 0, 0.0, d_h / unit)
        entropy = tl.load(results + 3 * stride_r + n)
        if d_h != 0:
            log2_mass = tl.log2(mass)
            for start in range(0, V, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                e = tl.load(row + columns, mask=columns < V, other=0.0).to(tl.float32)
                log_p = tl.maximum(tl.log2(e) - log2_mass, FLOOR) * LN2
                e *= on_logp + on_entropy * (log_p + entropy)
                tl.store(row + columns, e.to(tl.bfloat16), mask=columns < V)
            tl.debug_barrier()  # the target's entry is written last
        if (y >= 0) & (y < V):
            bits = tl.load(target + n)
            log_p = tl.maximum(tl.load(results + 2 * stride_r + n), FLOOR * LN2)
            at_target = on_entropy * tl.exp2(bits) * (log_p + entropy)
            at_target -= on_logp * tl.load(results + n)
            if softcap is not None:
                share = (bits + tl.load(reference + n)) / (exp2_scale * softcap)
                at_target *= tl.where(tl.abs(share) == float("inf"), 0.0, 1.0 - share * share)
            tl.store(row + y, at_target.to(tl.bfloat16))
    elif not (mass < float("inf")):  # 0 times nan or infinity would reach the backward GEMMs
        write_zeros(row, V, BLOCK)
    place = n
    if tokens is not None:
        place = tl.load(tokens + n)
    tl.store(factors + place, factor)


def exponentials(
    rows: Tensor,  # bfloat16 [M, H]
    weight: Tensor,  # bfloat16 [V, H]
    bias: Tensor | None,  # float32 [V]
    targets: Tensor,  # int64 [M]
    scaling: Scaling,
    values: Tensor | None,  # bfloat16 [M, V]: where the exponentials are stored
    tokens: Tensor | None,  # int64 [M]; None: consecutive ones
    factors: Tensor,  # float32 [N]; of consecutive tokens [M]
) -> Exponentials:
    """Compute the exponentials of a block's logits, and the statistics of its rows."""
    (count, width), vocab, device = rows.shape, len(weight), rows.device
    tiles = -(-vocab // TILES.columns)
    sums = torch.empty(2, tiles, count, dtype=torch.float32, device=device)
    results = torch.empty(7, count, dtype=torch.float32, device=device)
    reference, target, rest, mass, logps, entropy, lse = results.unbind()
    target.fill_(float("nan"))
    exponents = launch.scaling(scaling)
    del exponents["inverse_temperature"]
    common: dict[str, Any] = {
        "weight": weight,
        "rows": rows,
        "bias": bias,
        **launch.dense(targets=targets),
        "reference": reference,
        **exponents,
        "V": vocab,
        "H": width,
    }
    strides = {"stride_x": rows.stride(0), "stride_w": weight.stride(0)}
    block = min(TILES.block, triton.next_power_of_2(width))
    first = {**common, **strides, "BLOCK": block}
    launch.Launch(reference_kernel, count, first, 4).run(device)
    depth, part = TILES.depth, TILES.columns // 4
    gemm = {
        **common,
        "rows": TensorDescriptor.from_tensor(rows, [TILES.rows, depth]),
        "weight": TensorDescriptor.from_tensor(weight, [TILES.columns, depth]),
        "values": None
        if values is None
        else TensorDescriptor.from_tensor(values, [TILES.rows, part]),
        "rest": sums[0],
        "moment": sums[1],
        "target": target,
        "M": count,
        "ROWS": TILES.rows,
        "COLUMNS": TILES.columns,
        "DEPTH": depth,
        "GROUP": TILES.group,
        "PROGRAMS": launch.multiprocessors(device),
    }
    programs = min(gemm["PROGRAMS"], -(-count // TILES.rows) * tiles)
    launch.Launch(exponentials_kernel, programs, gemm, TILES.warps).run(device)
    added = {
        "targets": common["targets"],
        "reference": reference,
        "target": target,
        "rest": sums[0],
        "moment": sums[1],
        "results": results[2:],
        "M": count,
        "T": tiles,
        "V": vocab,
        "ROWS": 32,
        "DEPTH": 32,
    }
    launch.Launch(sums_kernel, -(-count // 32), added, 4).run(device)
    again = {
        **common,
        **strides,
        "values": values,
        "target": target,
        "results": results[2:],
        "M": count,
        "stride_e": 0 if values is None else values.stride(0),
        "COLUMNS": 128,
        "DEPTH": 64,
    }
    launch.Launch(guard_kernel, count, again, 4).run(device)
    return Exponentials(
        values=values,
        reference=reference,
        target=target,
        rest=rest,
        mass=mass,
        logps=logps,
        entropy=entropy,
        lse=lse,
        tokens=tokens,
        factors=factors,
        stride=count,
    )


def widen(
    rows: Exponentials,
    targets: Tensor,  # int64 [M]: columns of this shard, negative elsewhere
    upstream: Upstream,  # [M]: the statistics of the whole rows
) -> None:
    """Give the rows of a vocabulary shard the sums of the whole rows, for `finish`."""
    given = launch.dense(targets=targets, entropy=upstream.entropy, lse=upstream.lse)
    launch_on_rows(widen_kernel, rows, given)


def finish(
    rows: Exponentials,
    targets: Tensor,  # int64 [M]
    scaling: Scaling,
    upstream: Upstream,  # [M]
) -> None:
    """Turn exponentials into gradients of logits, up to a factor that is stored for each token."""
    derivatives = {"d_logps": upstream.d_logps, "d_entropy": upstream.d_entropy}
    given = launch.dense(tokens=rows.tokens, targets=targets, **derivatives)
    launch_on_rows(finish_kernel, rows, given | {"factors": rows.factors} | launch.scaling(scaling))


def launch_on_rows(kernel: Any, rows: Exponentials, given: dict[str, Any]) -> None:
    """Launch a kernel with a program per row, which changes the exponentials."""
    assert rows.values is not None
    count, vocab = rows.values.shape
    arguments = {
        "values": rows.values,
        "reference": rows.reference,
        "target": rows.target,
        "results": rows.rest,  # the first of five consecutive rows
        "stride_r": rows.stride,
        "V": vocab,
        "stride_e": rows.values.stride(0),
        "BLOCK": min(TILES.block, triton.next_power_of_2(vocab)),
    }
    launch.Launch(kernel, count, arguments | given, 4).run(rows.values.device)
