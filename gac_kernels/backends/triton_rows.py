"""Row kernels: one program per row of logits, so that any number of rows fits the grid.

Row n of a [B, T, V] tensor starts at (n // T) stride_b + (n % T) stride_t, in 64-bit arithmetic.
Legend: N = B T rows, V vocabulary, L lanes, R neighbouring words of a lane.
"""

import triton
import triton.language as tl

from .triton_math import (
    demonstration_term,
    kl_estimate,
    policy_term,
    row_values,
    write_gradient,
    write_zeros,
)

NO_LOSS = tl.constexpr(-100)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row(pointer, n, T, stride_b, stride_t):
    return pointer + (n // T) * stride_b + (n % T) * stride_t


# Only rows of logits are worth a kernel per alignment: the [N] vectors are often slices.
@triton.jit(do_not_specialize=["N", "T"], do_not_specialize_on_alignment=["targets", "results"])
def stats_kernel(
    logits,  # [B, T, V]
    targets,  # int64 [N]
    results,  # float32 [3, N]: logp, entropy, logsumexp; 0 where there is no loss
    N,
    T,
    V,
    stride_b: tl.int64,
    stride_t: tl.int64,
    k,
    L: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    logp = 0.0
    entropy = 0.0
    lse = 0.0
    if y != NO_LOSS:
        row = _row(logits, n, T, stride_b, stride_t)
        logp, entropy, lse, _, _ = row_values(row, y, V, k, False, L, R, STAGES)
    tl.store(results + n, logp)
    tl.store(results + N + n, entropy)
    tl.store(results + 2 * N + n, lse)


@triton.jit(
    do_not_specialize=["T"],
    do_not_specialize_on_alignment=["targets", "lse", "entropy", "d_logps", "d_entropy"],
)
def grads_kernel(
    logits,  # [B, T, V]
    out,  # [B, T, V]
    targets,  # int64 [N]
    lse,  # float32 [N]
    entropy,  # float32 [N]
    d_logps,  # float32 [N]
    d_entropy,  # float32 [N]
    T,
    V,
    stride_b: tl.int64,
    stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    k,
    inverse_temperature,
    FORWARD: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    d_logp = tl.load(d_logps + n)
    d_h = tl.load(d_entropy + n)
    into = _row(out, n, T, out_stride_b, out_stride_t)
    if (y != NO_LOSS) & ((d_logp != 0) | (d_h != 0)):
        row = _row(logits, n, T, stride_b, stride_t)
        nats = tl.load(lse + n)
        top = nats * LOG2E
        rest = tl.fma(nats, LOG2E, -top)  # what the product lost
        write_gradient(
            row, into, y, V, top, rest, k, d_logp * inverse_temperature, d_h * inverse_temperature,
            tl.load(entropy + n), True, FORWARD, BLOCK, STAGES,
        )  # fmt: skip
    else:
        write_zeros(into, V, BLOCK)


@triton.jit(
    do_not_specialize=["N", "T"],
    do_not_specialize_on_alignment=[
        "targets",
        "demo",
        "advantages",
        "old",
        "ref",
        "scale",
        "terms",
    ],
)
def loss_kernel(
    logits,  # [B, T, V]
    out,  # [B, T, V]: gradient of sum(scale * loss); None = not wanted
    targets,  # int64 [N]
    demo,  # bool [N]
    advantages,  # float32 [N]
    old,  # float32 [N], or None: the ratio is 1 and differentiable
    ref,  # float32 [N] or None
    scale,  # float32 [N]
    terms,  # float32 [5, N]: logp, entropy, loss, kl, clipped; 0 where there is no loss
    N,
    T,
    V,
    stride_b: tl.int64,
    stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    k,
    inverse_temperature,
    low,
    high,
    dual_clip,
    kl_coef,
    entropy_coef,
    demo_shape,
    HAS_DUAL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    KL: tl.constexpr,
    DEMO: tl.constexpr,
    FORWARD: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    logp = 0.0
    entropy = 0.0
    loss = 0.0
    kl = 0.0
    clipped = 0.0
    d_logp = 0.0
    d_entropy = 0.0
    top = 0.0
    bits = 0.0
    row = _row(logits, n, T, stride_b, stride_t)
    if y != NO_LOSS:
        logp, entropy, _, top, bits = row_values(row, y, V, k, out is not None, L, R, STAGES)
        advantage = tl.load(advantages + n)
        if tl.load(demo + n):
            loss, d_logp = demonstration_term(logp, advantage, demo_shape, DEMO)
        else:
            before = logp
            if old is not None:
                before = tl.load(old + n)
            loss, d_logp, clipped = policy_term(
                logp, before, advantage, low, high, dual_clip, HAS_DUAL
            )
            if ref is not None:
                kl, d_kl = kl_estimate(logp, tl.load(ref + n), KL)
                loss += tl.where(kl_coef == 0, 0.0, kl_coef * kl)
                d_logp += tl.where(kl_coef == 0, 0.0, kl_coef * d_kl)
            if HAS_ENTROPY:
                loss -= entropy_coef * entropy
                d_entropy = -entropy_coef
    tl.store(terms + n, logp)
    tl.store(terms + N + n, entropy)
    tl.store(terms + 2 * N + n, loss)
    tl.store(terms + 3 * N + n, kl)
    tl.store(terms + 4 * N + n, clipped)
    if out is not None:
        tl.debug_barrier()  # `out` may be the row, of which a slower warp still wants its target
        weight = tl.load(scale + n)
        d_logp *= weight
        d_entropy *= weight
        into = _row(out, n, T, out_stride_b, out_stride_t)
        if (d_logp != 0) | (d_entropy != 0):
            write_gradient(
                row, into, y, V, top, bits, k, d_logp * inverse_temperature,
                d_entropy * inverse_temperature, entropy, HAS_ENTROPY, FORWARD, L * R, STAGES,
            )  # fmt: skip
        else:
            write_zeros(into, V, L * R)


@triton.jit(do_not_specialize=["rows", "T"], do_not_specialize_on_alignment=["factor"])
def scale_kernel(
    tensor,  # [B, T, V]
    factor,  # 0-d
    rows,
    T,
    V: tl.int64,
    stride_b: tl.int64,
    stride_t: tl.int64,
    BLOCK: tl.constexpr,
):
    """tensor *= factor by a fixed number of programs, which all return at once when it is 1."""
    by = tl.load(factor).to(tl.float32)
    if by != 1:
        per_row = tl.cdiv(V, BLOCK)
        for tile in range(tl.program_id(0).to(tl.int64), rows * per_row, tl.num_programs(0)):
            row = _row(tensor, tile // per_row, T, stride_b, stride_t)
            words = (tile % per_row) * BLOCK + tl.arange(0, BLOCK)
            inside = words < V
            x = tl.load(row + words, mask=inside)
            x = (x.to(tl.float32) * by).to(x.dtype)
            tl.store(row + words, x, mask=inside)
