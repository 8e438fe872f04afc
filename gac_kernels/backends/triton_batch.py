"""Kernels of size N and S around the rows: the weights of the tokens, and the sums over them.

One program has a sequence to itself and one last program merges them, in a fixed order, so that
nothing is added atomically. Sums run in float64. Legend: N tokens, S sequences, T row length.
"""

import triton
import triton.language as tl

NO_LOSS = tl.constexpr(-100)
SUMS = 9  # float64 that `sequence_kernel` leaves of each sequence


@triton.jit(
    do_not_specialize=["T", "S"],
    do_not_specialize_on_alignment=["targets", "cu_seqlens", "offsets", "lengths"],
)
def lengths_kernel(
    targets,  # int64 [N]
    cu_seqlens,  # int [S + 1], or None: sequences of T tokens
    offsets,  # int64 [S + 1]: where each sequence starts and the last one ends
    lengths,  # int64 [S]: tokens with a loss
    T: tl.int64,
    S,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + s).to(tl.int64)
        end = tl.load(cu_seqlens + s + 1).to(tl.int64)
    else:
        begin = s * T
        end = begin + T
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count += tl.load(targets + i, mask=i < end, other=NO_LOSS) != NO_LOSS
    tl.store(lengths + s, tl.sum(count))
    tl.store(offsets + s, begin)
    if s == S - 1:
        tl.store(offsets + S, end)


@triton.jit
def token_weight(
    length, lengths, is_demo, S, norm, number, max_tokens,
    SIDE: tl.constexpr, REDUCTION: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32: weight of one of the `length` tokens of a sequence; 0 for an empty denominator."""
    if norm is not None:
        total = tl.load(norm).to(tl.float64)
    elif OWN:
        parts = tl.zeros([BLOCK], tl.int64)
        for start in range(0, S, BLOCK):
            j = start + tl.arange(0, BLOCK)
            tokens = tl.load(lengths + j, mask=j < S, other=0)
            mine = (j < S) & ((tl.load(is_demo + j, mask=j < S, other=0) != 0) == SIDE)
            if REDUCTION == "token":
                parts += tl.where(mine, tokens, 0)
            elif REDUCTION == "sequence":
                parts += (mine & (tokens > 0)).to(tl.int64)
            else:
                parts += mine.to(tl.int64)
        total = tl.sum(parts).to(tl.float64)
    else:
        total = tl.full([], 0.0, tl.float64) + number
    if REDUCTION == "sequence":
        total *= length.to(tl.float64)
    elif REDUCTION == "constant":
        total *= max_tokens
    empty = total == 0
    return tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total)).to(tl.float32)


@triton.jit(
    do_not_specialize=["S", "P"],
    do_not_specialize_on_alignment=[
        "targets", "advantages", "is_demo", "mu", "old", "ref", "rollout_norm", "demo_norm",
        "offsets", "lengths", "live", "demo", "sequence", "floats",
    ],
)  # fmt: skip
def tokens_kernel(
    targets,  # int64 [N]
    advantages,  # [S] or [N], any float
    is_demo,  # bool [S]
    old,  # [N], any float, or None
    ref,  # [N], any float, or None
    mu,  # 0-d, or None: `mu_number`
    rollout_norm,  # 0-d, or None: `rollout_number`, or the batch's own under ROLLOUT_OWN
    demo_norm,
    offsets,  # int64 [S + 1]
    lengths,  # int64 [S]
    live,  # bool [N]
    demo,  # bool [N]
    sequence,  # int64 [N]
    floats,  # float32 [5, N]: advantages, weight, scale, old, ref
    N: tl.int64,
    S,
    P,  # programs that share a sequence
    mu_number,
    mu_rest,  # 1 - mu
    rollout_number,
    demo_number,
    max_tokens,
    PER_SEQUENCE: tl.constexpr,
    SHAPED: tl.constexpr,
    ROLLOUT: tl.constexpr,
    DEMO: tl.constexpr,
    ROLLOUT_OWN: tl.constexpr,
    DEMO_OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = (tl.program_id(0) // P).to(tl.int64)
    part = tl.program_id(0) % P
    begin = tl.load(offsets + s)
    end = tl.load(offsets + s + 1)
    length = tl.load(lengths + s)
    d = tl.load(is_demo + s) != 0
    if mu is not None:
        share = tl.load(mu).to(tl.float32)
        rest = 1.0 - share
    else:
        share = tl.full([], 0.0, tl.float32) + mu_number
        rest = tl.full([], 0.0, tl.float32) + mu_rest
    if d:
        w = token_weight(
            length, lengths, is_demo, S, demo_norm, demo_number, max_tokens, True, DEMO,
            DEMO_OWN, BLOCK,
        )  # fmt: skip
    else:
        w = token_weight(
            length, lengths, is_demo, S, rollout_norm, rollout_number, max_tokens, False, ROLLOUT,
            ROLLOUT_OWN, BLOCK,
        )  # fmt: skip
        share = rest
    for start in range(begin + part * BLOCK, end, P * BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        has_loss = tl.load(targets + i, mask=inside, other=NO_LOSS) != NO_LOSS
        rollout = has_loss & (d == 0)
        reads = has_loss if SHAPED else rollout
        index = i * 0 + s if PER_SEQUENCE else i
        advantage = tl.load(advantages + index, mask=reads, other=0.0).to(tl.float32)
        weight = tl.where(has_loss, w, 0.0)
        tl.store(live + i, has_loss, mask=inside)
        tl.store(demo + i, inside & d, mask=inside)
        tl.store(sequence + i, i * 0 + s, mask=inside)
        tl.store(floats + i, advantage, mask=inside)
        tl.store(floats + N + i, weight, mask=inside)
        tl.store(floats + 2 * N + i, weight * share, mask=inside)
        if old is not None:
            value = tl.load(old + i, mask=rollout, other=0.0).to(tl.float32)
            tl.store(floats + 3 * N + i, value, mask=inside)
        if ref is not None:
            value = tl.load(ref + i, mask=rollout, other=0.0).to(tl.float32)
            tl.store(floats + 4 * N + i, value, mask=inside)


@triton.jit(
    do_not_specialize=["S"],
    do_not_specialize_on_alignment=[
        "live", "advantages", "weight", "offsets", "lengths", "is_demo", "logps", "entropy", "loss",
        "kl", "clipped", "sums", "demo_nll",
    ],
)  # fmt: skip
def sequence_kernel(
    live,  # bool [N]
    advantages,  # float32 [N], as the rest of the tokens' vectors
    weight,
    offsets,  # int64 [S + 1]
    lengths,  # int64 [S]
    is_demo,  # bool [S]
    logps,
    entropy,
    loss,
    kl,
    clipped,
    sums,  # float64 [SUMS, S]: loss, kl, clipped, entropy; means of s and r, of their products
    demo_nll,  # float64 [S], or None: without the moments
    S,
    BLOCK: tl.constexpr,
):
    """The sums of one sequence; s = p (1 - p) and r = advantage, centred at their means in it."""
    n = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + n)
    end = tl.load(offsets + n + 1)
    length = tl.load(lengths + n).to(tl.float64)
    share = tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)
    zero = tl.zeros([BLOCK], tl.float64)
    losses, kls, clips, entropies, log_sum, s_sum, r_sum = zero, zero, zero, zero, zero, zero, zero
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        alive = (tl.load(live + i, mask=inside, other=0) != 0) & inside
        part = tl.load(weight + i, mask=inside, other=0.0)
        part *= tl.load(loss + i, mask=inside, other=0.0)
        losses += part.to(tl.float64)
        kls += tl.load(kl + i, mask=inside, other=0.0).to(tl.float64)
        clips += tl.load(clipped + i, mask=inside, other=0.0).to(tl.float64)
        entropies += tl.load(entropy + i, mask=alive, other=0.0).to(tl.float64)
        if demo_nll is not None:
            logp = tl.load(logps + i, mask=inside, other=0.0).to(tl.float64)
            p = tl.exp(logp)
            log_sum += logp
            s_sum += tl.where(alive, p * (1.0 - p), 0.0)
            r_sum += tl.load(advantages + i, mask=alive, other=0.0).to(tl.float64)
    tl.store(sums + n, tl.sum(losses))
    tl.store(sums + S + n, tl.sum(kls))
    tl.store(sums + 2 * S + n, tl.sum(clips))
    tl.store(sums + 3 * S + n, tl.sum(entropies))
    if demo_nll is not None:
        there = (length > 0) & (tl.load(is_demo + n) != 0)
        tl.store(demo_nll + n, tl.where(there, -tl.sum(log_sum) * share, float("-inf")))
        mean_s = tl.sum(s_sum) * share
        mean_r = tl.sum(r_sum) * share
        ss, rr, sr = zero, zero, zero
        for start in range(begin, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            alive = tl.load(live + i, mask=i < end, other=0) != 0
            p = tl.exp(tl.load(logps + i, mask=alive, other=0.0).to(tl.float64))
            r = tl.load(advantages + i, mask=alive, other=0.0).to(tl.float64)
            ds = tl.where(alive, p * (1.0 - p) - mean_s, 0.0)
            dr = tl.where(alive, r - mean_r, 0.0)
            ss += ds * ds
            rr += dr * dr
            sr += ds * dr
        tl.store(sums + 4 * S + n, mean_s)
        tl.store(sums + 5 * S + n, mean_r)
        tl.store(sums + 6 * S + n, tl.sum(ss) * share)
        tl.store(sums + 7 * S + n, tl.sum(rr) * share)
        tl.store(sums + 8 * S + n, tl.sum(sr) * share)


@triton.jit
def merge_moments(sums, lengths, is_demo, moments, S, BLOCK: tl.constexpr):
    """TokenMoments.rollouts from the sequences': Chan's rule with one unit of weight for each.

    Demonstrations enter with the factor 0, so that a nan of theirs shows.
    """
    zero = tl.zeros([BLOCK], tl.float64)
    count, s_sum, r_sum = zero, zero, zero
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        length = tl.load(lengths + j, mask=j < S, other=0)
        rollout = (length > 0) & (tl.load(is_demo + j, mask=j < S, other=1) == 0)
        keep = rollout.to(tl.float64)
        count += keep
        s_sum += keep * tl.load(sums + 4 * S + j, mask=j < S, other=0.0)
        r_sum += keep * tl.load(sums + 5 * S + j, mask=j < S, other=0.0)
    n = tl.sum(count)
    some = tl.where(n > 1, n, 1.0)
    mean_s = tl.sum(s_sum) / some
    mean_r = tl.sum(r_sum) / some
    ss, rr, sr, aa = zero, zero, zero, zero
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        length = tl.load(lengths + j, mask=j < S, other=0)
        rollout = (length > 0) & (tl.load(is_demo + j, mask=j < S, other=1) == 0)
        keep = rollout.to(tl.float64)
        ds = tl.load(sums + 4 * S + j, mask=j < S, other=0.0) - mean_s
        dr = tl.load(sums + 5 * S + j, mask=j < S, other=0.0) - mean_r
        ss += keep * (tl.load(sums + 6 * S + j, mask=j < S, other=0.0) + ds * ds)
        rr += keep * (tl.load(sums + 7 * S + j, mask=j < S, other=0.0) + dr * dr)
        sr += keep * (tl.load(sums + 8 * S + j, mask=j < S, other=0.0) + ds * dr)
        aa += tl.where(rollout, dr * dr, 0.0)
    tl.store(moments, n)
    tl.store(moments + 1, mean_s)
    tl.store(moments + 2, mean_r)
    tl.store(moments + 3, tl.sum(ss))
    tl.store(moments + 4, tl.sum(rr))
    tl.store(moments + 5, tl.sum(sr))
    tl.store(moments + 6, tl.sum(aa))


@triton.jit(
    do_not_specialize=["S"],
    do_not_specialize_on_alignment=[
        "sums", "lengths", "is_demo", "mu", "mixed", "scalars", "moments", "totals",
    ],
)  # fmt: skip
def merge_kernel(
    sums,  # float64 [SUMS, S], of `sequence_kernel`
    lengths,  # int64 [S]
    is_demo,  # bool [S]
    mu,  # 0-d, or None: `mu_number`
    mixed,  # float32 0-d: the loss
    scalars,  # float32 [4]: rollout_loss, demo_loss, kl, clip_fraction
    moments,  # float64 [7], or None
    totals,  # float64 [6]
    S,
    mu_number,
    mu_rest,
    HAS_REF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the sequences of both sides become the results."""
    zero = tl.zeros([BLOCK], tl.float64)
    rollouts, demos, rollout_loss, demo_loss = zero, zero, zero, zero
    kls, clips, rollout_entropy, demo_entropy = zero, zero, zero, zero
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        demo = tl.load(is_demo + j, mask=j < S, other=0) != 0
        tokens = tl.load(lengths + j, mask=j < S, other=0).to(tl.float64)
        loss = tl.load(sums + j, mask=j < S, other=0.0)
        entropy = tl.load(sums + 3 * S + j, mask=j < S, other=0.0)
        rollouts += tl.where(demo, 0.0, tokens)
        demos += tl.where(demo, tokens, 0.0)
        rollout_loss += tl.where(demo, 0.0, loss)
        demo_loss += tl.where(demo, loss, 0.0)
        rollout_entropy += tl.where(demo, 0.0, entropy)
        demo_entropy += tl.where(demo, entropy, 0.0)
        kls += tl.load(sums + S + j, mask=j < S, other=0.0)
        clips += tl.load(sums + 2 * S + j, mask=j < S, other=0.0)
    if mu is not None:
        share = tl.load(mu).to(tl.float64)
        rest = 1.0 - share
    else:
        share = tl.full([], 0.0, tl.float64) + mu_number
        rest = tl.full([], 0.0, tl.float64) + mu_rest
    policy = tl.sum(rollout_loss)
    imitation = tl.sum(demo_loss)
    tokens = tl.sum(rollouts)
    some = tl.where(tokens > 1, tokens, 1.0)
    kl = tl.sum(kls) if HAS_REF else tl.full([], float("nan"), tl.float64)
    clipped = tl.sum(clips)
    tl.store(mixed, (rest * policy + share * imitation).to(tl.float32))
    tl.store(scalars, policy.to(tl.float32))
    tl.store(scalars + 1, imitation.to(tl.float32))
    tl.store(scalars + 2, tl.where(tokens > 0, kl / some, float("nan")).to(tl.float32))
    tl.store(scalars + 3, (clipped / some).to(tl.float32))
    if moments is not None:
        tl.store(totals, tokens)
        tl.store(totals + 1, tl.sum(demos))
        tl.store(totals + 2, kl)
        tl.store(totals + 3, clipped)
        tl.store(totals + 4, tl.sum(rollout_entropy))
        tl.store(totals + 5, tl.sum(demo_entropy))
        merge_moments(sums, lengths, is_demo, moments, S, BLOCK)
