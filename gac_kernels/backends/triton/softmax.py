"""Device functions for one row of logits: softmax statistics in one read, gradient in one write.

Notation: V vocabulary size, L lanes, R consecutive logits per lane. Each lane keeps its own maximum
and sums. The loop over the vocabulary therefore needs no exchange between threads, and a sum of V
terms is a tree reduction of L short sums. Exponents are base 2: z = x exp2_scale for a logit x,
where exp2_scale = log2(e) / temperature. With a softcap, x is the capped logit; None: no softcap,
and no code for it.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-300.0)  # 2^-300 is 0 in float32: replaces -inf, because 0 * inf would be nan
NO_LOSS = tl.constexpr(-100)


@triton.jit
def row_at(pointer, n, T, stride_b, stride_t):
    """Row n of a [B, T, V] tensor, in 64-bit arithmetic: n must be int64."""
    return pointer + (n // T) * stride_b + (n % T) * stride_t


@triton.jit
def row_scaling(temperatures, n, exp2_scale, inverse_temperature):
    """The scaling of row n, whose temperature is temperatures[n] unless that is None."""
    if temperatures is not None:
        inverse_temperature = 1.0 / tl.load(temperatures + n)
        exp2_scale *= inverse_temperature
    return exp2_scale, inverse_temperature


@triton.jit
def tanh(x):
    """tanh, which the interpreter lacks.

    It is computed as 1 - 2 / (e^(2x) + 1), or as a polynomial near 0, where that form cancels.
    """
    x = tl.where(x > 9.1, 9.1, tl.where(x < -9.1, -9.1, x))  # +-1 in float32; keeps nan
    magnitude = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(magnitude * 2.885390081777926815) + 1.0)  # 2 log2(e)
    s = x * x
    near = 2.06390887954e-2 - 5.70498872745e-3 * s
    near = near * s - 5.37397155531e-2
    near = near * s + 1.33314422036e-1
    near = near * s - 3.33332819422e-1
    return tl.where(magnitude < 0.625, near * s * x + x, tl.where(x < 0, -far, far))


@triton.jit
def cap(x, softcap):
    """softcap tanh(x / softcap) of logits x as float32; infinities are not capped."""
    x = x.to(tl.float32)
    if softcap is not None:
        x = tl.where(tl.abs(x) == float("inf"), x, softcap * tanh(x * (1.0 / softcap)))
    return x


@triton.jit
def absorb(top, mass, moment, x, exp2_scale):
    """Update each lane's `top`, `mass` and `moment` with a tile x [L, R] of logits.

    top = max z, mass = sum 2^d and moment = sum d 2^d, where z = x exp2_scale and d = z - top.
    A nan or +inf in x makes `mass` nan permanently; -inf adds nothing, even before the first finite
    logit.
    """
    peak = tl.maximum(top, tl.max(x, 1) * exp2_scale)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    shift = tl.maximum(top - anchor, FLOOR)
    decay = tl.exp2(shift)
    d = tl.fma(
        x, exp2_scale, -anchor[:, None]
    )  # one rounding, after the large terms have cancelled
    p = tl.exp2(d)
    moment = (moment + shift * mass) * decay + tl.sum(p * tl.maximum(d, FLOOR), 1)
    mass = mass * decay + tl.sum(p, 1)
    return peak, mass, moment


@triton.jit
def gather(top, mass, moment):
    """Combine the sums [L] of the lanes into the sums of the whole row."""
    peak = tl.max(top, 0)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    shift = tl.maximum(top - anchor, FLOOR)
    decay = tl.exp2(shift)
    return peak, tl.sum(mass * decay, 0), tl.sum((moment + shift * mass) * decay, 0)


@triton.jit
def read_row(
    row,
    V,
    exp2_scale,
    softcap,
    REREAD: tl.constexpr,
    PEEL: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read a row once and return max z, sum 2^d and sum d 2^d, with d = z - max z.

    REREAD: the row will be read a second time, so it should stay in the cache. PEEL: the row may
    start at any address, so its first logits are read separately, up to an address that is a
    multiple of 16; the rest is then read 16 bytes at a time.
    """
    EVICT: tl.constexpr = "evict_last" if REREAD else "evict_first"
    top = tl.full([L], float("-inf"), tl.float32)
    mass = tl.zeros([L], tl.float32)
    moment = tl.zeros([L], tl.float32)
    offsets = tl.arange(0, L)[:, None] * R + tl.arange(0, R)[None, :]
    if PEEL:
        size: tl.constexpr = 16 // R
        first = ((16 - row.to(tl.int64) % 16) % 16 // size).to(tl.int32)  # at least 1 to V // 16
        x = tl.load(row + offsets, mask=offsets < first, other=float("-inf"))
        top, mass, moment = absorb(top, mass, moment, cap(x, softcap), exp2_scale)
        row = tl.multiple_of(row + first, 16)
        V -= first
    full = V // (L * R) * (L * R)  # only the last tile needs a mask
    for start in tl.range(0, full, L * R, num_stages=STAGES):
        x = tl.load(row + start + offsets, eviction_policy=EVICT)
        top, mass, moment = absorb(top, mass, moment, cap(x, softcap), exp2_scale)
    if full < V:
        x = tl.load(row + full + offsets, mask=full + offsets < V, other=float("-inf"))
        top, mass, moment = absorb(top, mass, moment, cap(x, softcap), exp2_scale)
    return gather(top, mass, moment)


@triton.jit
def row_values(
    row,
    y,
    V,
    exp2_scale,
    softcap,
    REREAD: tl.constexpr,
    PEEL: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The logp of token y, the entropy, and the logsumexp in nats and in bits.

    The logsumexp in bits is returned as two summands: the maximum and log2 of the mass. With y
    outside [0, V), logp is nan and no target logit is read.
    """
    top, mass, moment = read_row(row, V, exp2_scale, softcap, REREAD, PEEL, L, R, STAGES)
    x = target_logit(row, y, V, softcap)
    return statistics(top, mass, moment, x, exp2_scale)


@triton.jit
def target_logit(row, y, V, softcap):
    """The logit of token y; y outside [0, V) reads nothing and gives nan."""
    return cap(tl.load(row + y, mask=(y >= 0) & (y < V), other=float("nan")), softcap)


@triton.jit
def statistics(top, mass, moment, x, exp2_scale):
    """The results of `row_values`, from the row's sums and the target's logit x."""
    log2_mass = tl.log2(mass)
    logp = (tl.fma(x, exp2_scale, -top) - log2_mass) * LN2
    entropy = (log2_mass - moment / mass) * LN2
    return logp, entropy, (top + log2_mass) * LN2, top, log2_mass


@triton.jit
def gradient_tile(
    x,
    hit,
    top,
    log2_mass,
    exp2_scale,
    softcap,
    d_logp,
    d_entropy,
    entropy,
    HAS_ENTROPY: tl.constexpr,
):
    """d_logp (hit - p) - d_entropy p (log p + H) for a tile x of logits."""
    z = cap(x, softcap)
    d = tl.fma(z, exp2_scale, -top) - log2_mass
    p = tl.exp2(d)
    gradient = tl.where(hit, d_logp, 0.0) - d_logp * p
    if HAS_ENTROPY:
        gradient -= d_entropy * p * (tl.maximum(d, FLOOR) * LN2 + entropy)
    if softcap is not None:
        share = z * (1.0 / softcap)
        gradient *= tl.where(tl.abs(share) == float("inf"), 0.0, 1.0 - share * share)
    return gradient


@triton.jit
def write_gradient(
    row,
    out,
    y,
    V,
    top,
    log2_mass,
    exp2_scale,
    softcap,
    d_logp,
    d_entropy,
    entropy,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [V] = d_logp (onehot - p) - d_entropy p (log p + H), with p = 2^(z - top - log2_mass).

    With a softcap, times its derivative.

    Runs backwards, because the end of the row was read last and is still in the cache. `out` may be
    the row itself.
    """
    y = tl.where((y >= 0) & (y < V), y, -1).to(tl.int32)  # one comparison instruction per element
    tiles = V // BLOCK
    offsets = tiles * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row + offsets, mask=offsets < V, other=0.0)
    gradient = gradient_tile(
        x=x,
        hit=offsets == y,
        top=top,
        log2_mass=log2_mass,
        exp2_scale=exp2_scale,
        softcap=softcap,
        d_logp=d_logp,
        d_entropy=d_entropy,
        entropy=entropy,
        HAS_ENTROPY=HAS_ENTROPY,
    )
    tl.store(out + offsets, gradient.to(out.dtype.element_ty), mask=offsets < V)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        offsets = (tiles - 1 - tile) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row + offsets, eviction_policy="evict_first")
        gradient = gradient_tile(
            x=x,
            hit=offsets == y,
            top=top,
            log2_mass=log2_mass,
            exp2_scale=exp2_scale,
            softcap=softcap,
            d_logp=d_logp,
            d_entropy=d_entropy,
            entropy=entropy,
            HAS_ENTROPY=HAS_ENTROPY,
        )
        tl.store(out + offsets, gradient.to(out.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def write_zeros(out, V, BLOCK: tl.constexpr):
    """out [V] = 0."""
    for start in range(0, V, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(out + offsets, tl.zeros([BLOCK], out.dtype.element_ty), mask=offsets < V)
