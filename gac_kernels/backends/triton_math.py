"""Device functions: one row's softmax, read once, and the loss formulas of one token.

Legend: V vocabulary, L lanes, R neighbouring words of a lane. A lane keeps its own maximum and
sums, so that the loop over the vocabulary needs no exchange between threads, and a sum of V terms
is a tree over L short ones. Exponents are base 2: `k` = log2(e) / temperature.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-300.0)  # 2^-300 is 0 in float32: stands for -inf where 0 * inf would be nan
MAX_LOG_RATIO = tl.constexpr(80.0)  # exp overflows at 88


@triton.jit
def absorb(top, mass, moment, x, k):
    """Add a tile x [L, R] to the lanes' maximum, sum 2^d and sum d 2^d, d = (x - top) k.

    A nan or +inf in x makes `mass` nan for good; -inf adds nothing, even before the first number.
    """
    peak = tl.maximum(top, tl.max(x, 1))
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    shift = tl.maximum((top - anchor) * k, FLOOR)
    decay = tl.exp2(shift)
    d = (x - anchor[:, None]) * k
    p = tl.exp2(d)
    moment = (moment + shift * mass) * decay + tl.sum(p * tl.maximum(d, FLOOR), 1)
    mass = mass * decay + tl.sum(p, 1)
    return peak, mass, moment


@triton.jit
def gather(top, mass, moment, k):
    """The lanes' [L] sums as those of the whole row."""
    peak = tl.max(top, 0)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    shift = tl.maximum((top - anchor) * k, FLOOR)
    decay = tl.exp2(shift)
    return peak, tl.sum(mass * decay, 0), tl.sum((moment + shift * mass) * decay, 0)


@triton.jit
def read_row(row, V, k, L: tl.constexpr, R: tl.constexpr):
    """One read of a row: its maximum, sum 2^d and sum d 2^d."""
    top = tl.full([L], float("-inf"), tl.float32)
    mass = tl.zeros([L], tl.float32)
    moment = tl.zeros([L], tl.float32)
    words = tl.arange(0, L)[:, None] * R + tl.arange(0, R)[None, :]
    for start in range(0, V, L * R):
        inside = start + words < V
        x = tl.load(
            row + start + words, mask=inside, other=float("-inf"), eviction_policy="evict_last"
        )
        top, mass, moment = absorb(top, mass, moment, x.to(tl.float32), k)
    return gather(top, mass, moment, k)


@triton.jit
def row_values(row, y, V, k, inverse_temperature, L: tl.constexpr, R: tl.constexpr):
    """logp of word y, entropy and logsumexp in nats, then maximum and log2 of the mass.

    y outside [0, V) reads nothing and gives nan.
    """
    top, mass, moment = read_row(row, V, k, L, R)
    x = tl.load(row + y, mask=(y >= 0) & (y < V), other=float("nan")).to(tl.float32)
    log_mass = tl.log(mass)
    logp = (x - top) * inverse_temperature - log_mass
    entropy = log_mass - moment / mass * LN2
    return logp, entropy, top * inverse_temperature + log_mass, top, log_mass / LN2


@triton.jit
def write_gradient(
    row,
    out,
    y,
    V,
    anchor,  # p = 2^((x - anchor) k - offset)
    offset,
    entropy,
    d_logp,
    d_entropy,
    k,
    inverse_temperature,
    HAS_ENTROPY: tl.constexpr,
    FORWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [V] = (d_logp (onehot - p) - d_entropy p (log p + H)) / temperature.

    Backwards, since what was read last is still in the cache. FORWARD is for `out` of a narrower
    type inside the row's own storage: there a tile is read by all before any thread writes.
    """
    tiles = tl.cdiv(V, BLOCK)
    for tile in range(tiles):
        start = (tile if FORWARD else tiles - 1 - tile) * BLOCK
        words = start + tl.arange(0, BLOCK)
        inside = words < V
        x = tl.load(row + words, mask=inside, other=0.0, eviction_policy="evict_first")
        if FORWARD:
            tl.debug_barrier()
        d = (x.to(tl.float32) - anchor) * k - offset
        p = tl.exp2(d)
        gradient = tl.where(words == y, d_logp, 0.0) - d_logp * p
        if HAS_ENTROPY:
            gradient -= d_entropy * p * (tl.maximum(d, FLOOR) * LN2 + entropy)
        gradient = (gradient * inverse_temperature).to(out.dtype.element_ty)
        tl.store(out + words, gradient, mask=inside, eviction_policy="evict_first")


@triton.jit
def write_zeros(out, V, BLOCK: tl.constexpr):
    """out [V] = 0."""
    for start in range(0, V, BLOCK):
        words = start + tl.arange(0, BLOCK)
        tl.store(out + words, tl.zeros([BLOCK], out.dtype.element_ty), mask=words < V)


@triton.jit
def kl_estimate(logp, ref, KL: tl.constexpr):
    """The estimator and its derivative in logp."""
    d = ref - logp
    if KL == "k1":
        return -d, tl.full([], 1.0, tl.float32)
    elif KL == "k2":  # noqa: RET505 - Triton prunes constexpr branches, not code after a return
        return d * d / 2, -d
    else:
        growth = tl.exp(d)
        return growth - d - 1.0, 1.0 - growth


@triton.jit
def policy_term(logp, old, advantage, low, high, dual_clip, HAS_DUAL: tl.constexpr):
    """The clipped policy term, its derivative in logp, and 1 where the clip removed that."""
    log_ratio = logp - old
    ratio = tl.exp(tl.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio))
    bounded = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    free = ratio * advantage
    bound = bounded * advantage
    clipped = free > bound
    loss = -tl.where(clipped, bound, free)
    if HAS_DUAL:
        ceiling = -dual_clip * advantage
        beyond = (advantage < 0) & (loss > ceiling)
        loss = tl.where(beyond, ceiling, loss)
        clipped = clipped | beyond
    d_logp = tl.where(clipped | (log_ratio > MAX_LOG_RATIO), 0.0, -free)
    return loss, d_logp, tl.where(clipped, 1.0, 0.0)


@triton.jit
def demonstration_term(logp, advantage, shape, DEMO: tl.constexpr):
    """The loss of a demonstration token and its derivative in logp."""
    p = tl.exp(logp)
    if DEMO == "shaped":
        loss = -advantage * p / (p + shape)
        d_logp = loss * shape / (p + shape)
    elif DEMO == "trust":
        loss = -p / tl.where(p < shape, shape, p)
        d_logp = loss
    else:
        if DEMO == "one":
            d_logp = tl.full([], -1.0, tl.float32)
        elif DEMO == "p":
            d_logp = -p
        else:
            d_logp = -p * (1.0 - p)
        loss = d_logp * logp
    return loss, d_logp
