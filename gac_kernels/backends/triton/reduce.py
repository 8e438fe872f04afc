"""The sums over all tokens, in two launches: first per sequence, then over all sequences.

Sums are float64 in a fixed order; there are no atomic adds.
Notation: N tokens, S sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import TokenMoments
from ...tokens import Summary, Tokens, TokenTerms
from .. import reference
from . import launch

SUMS = 9  # float64 values that `sequence_kernel` writes per sequence
_WARPS = 4
# pointers that need not be aligned, because they are often slices
_TOKEN_VECTORS = ["live", "advantages", "weight", "logps", "entropy", "loss", "kl", "clipped"]
_SEQUENCE_VECTORS = ["offsets", "lengths", "is_demo", "sums", "demo_nll"]
_MERGE_VECTORS = ["sums", "lengths", "is_demo", "mu", "mixed", "scalars", "moments", "totals"]


@triton.jit(
    do_not_specialize=["S"],
    do_not_specialize_on_alignment=_TOKEN_VECTORS + _SEQUENCE_VECTORS,
)
def sequence_kernel(
    live,  # bool [N]
    advantages,  # float32 [N], like the other per-token vectors
    weight,
    offsets,  # int64 [S + 1]
    lengths,  # int64 [S]
    is_demo,  # bool [S]
    logps,
    entropy,
    loss,
    kl,
    clipped,
    sums,  # float64 [SUMS, S]: loss, kl, clipped, entropy; mean s, mean r; means of ss, rr and sr
    demo_nll,  # float64 [S], or None: no moments
    S,
    BLOCK: tl.constexpr,
):
    """The sums of one sequence.

    s = p (1 - p) and r = advantage; the products ss, rr and sr are centered on their means within
    the sequence.
    """
    n = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + n)
    end = tl.load(offsets + n + 1)
    length = tl.load(lengths + n).to(tl.float64)
    inv_length = tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)
    zero = tl.zeros([BLOCK], tl.float64)
    losses, kls, clips, entropies, log_sum, s_sum, r_sum = zero, zero, zero, zero, zero, zero, zero
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        has_loss = (tl.load(live + i, mask=inside, other=0) != 0) & inside
        part = tl.load(weight + i, mask=inside, other=0.0)
        part *= tl.load(loss + i, mask=inside, other=0.0)
        losses += part.to(tl.float64)
        kls += tl.load(kl + i, mask=inside, other=0.0).to(tl.float64)
        clips += tl.load(clipped + i, mask=inside, other=0.0).to(tl.float64)
        entropies += tl.load(entropy + i, mask=has_loss, other=0.0).to(tl.float64)
        if demo_nll is not None:
            logp = tl.load(logps + i, mask=inside, other=0.0).to(tl.float64)
            p = tl.exp(logp)
            log_sum += logp
            s_sum += tl.where(has_loss, p * (1.0 - p), 0.0)
            r_sum += tl.load(advantages + i, mask=has_loss, other=0.0).to(tl.float64)
    tl.store(sums + n, tl.sum(losses))
    tl.store(sums + S + n, tl.sum(kls))
    tl.store(sums + 2 * S + n, tl.sum(clips))
    tl.store(sums + 3 * S + n, tl.sum(entropies))
    if demo_nll is not None:
        is_nonempty_demo = (length > 0) & (tl.load(is_demo + n) != 0)
        tl.store(
            demo_nll + n, tl.where(is_nonempty_demo, -tl.sum(log_sum) * inv_length, float("-inf"))
        )
        mean_s = tl.sum(s_sum) * inv_length
        mean_r = tl.sum(r_sum) * inv_length
        ss, rr, sr = zero, zero, zero
        for start in range(begin, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            has_loss = tl.load(live + i, mask=i < end, other=0) != 0
            p = tl.exp(tl.load(logps + i, mask=has_loss, other=0.0).to(tl.float64))
            r = tl.load(advantages + i, mask=has_loss, other=0.0).to(tl.float64)
            ds = tl.where(has_loss, p * (1.0 - p) - mean_s, 0.0)
            dr = tl.where(has_loss, r - mean_r, 0.0)
            ss += ds * ds
            rr += dr * dr
            sr += ds * dr
        tl.store(sums + 4 * S + n, mean_s)
        tl.store(sums + 5 * S + n, mean_r)
        tl.store(sums + 6 * S + n, tl.sum(ss) * inv_length)
        tl.store(sums + 7 * S + n, tl.sum(rr) * inv_length)
        tl.store(sums + 8 * S + n, tl.sum(sr) * inv_length)


@triton.jit
def merge_moments(sums, lengths, is_demo, moments, S, BLOCK: tl.constexpr):
    """Merge the moments of all sequences into TokenMoments.rollouts by Chan's formula.

    Rollouts have weight 1 and demonstrations weight 0; they are not skipped, so that a nan in a
    demonstration still propagates.
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
    denominator = tl.where(n > 1, n, 1.0)
    mean_s = tl.sum(s_sum) / denominator
    mean_r = tl.sum(r_sum) / denominator
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
    do_not_specialize_on_alignment=_MERGE_VECTORS,
)
def merge_kernel(
    sums,  # float64 [SUMS, S], from `sequence_kernel`
    lengths,  # int64 [S]
    is_demo,  # bool [S]
    mu,  # 0-d, or None: `mu_number`
    mixed,  # float32 0-d: the loss
    scalars,  # float32 [4]: rollout_loss, demo_loss, kl, clip_fraction
    moments,  # float64 [7], or None
    totals,  # float64 [6]
    S,
    mu_number,
    one_minus_mu_number,
    HAS_REF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce the sums of all sequences to the results; runs as one program."""
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
        mu_value = tl.load(mu).to(tl.float64)
        one_minus_mu = 1.0 - mu_value
    else:
        mu_value = tl.full([], 0.0, tl.float64) + mu_number
        one_minus_mu = tl.full([], 0.0, tl.float64) + one_minus_mu_number
    rollout_total = tl.sum(rollout_loss)
    demo_total = tl.sum(demo_loss)
    tokens = tl.sum(rollouts)
    denominator = tl.where(tokens > 1, tokens, 1.0)
    kl = tl.sum(kls) if HAS_REF else tl.full([], float("nan"), tl.float64)
    clipped = tl.sum(clips)
    tl.store(mixed, (one_minus_mu * rollout_total + mu_value * demo_total).to(tl.float32))
    tl.store(scalars, rollout_total.to(tl.float32))
    tl.store(scalars + 1, demo_total.to(tl.float32))
    tl.store(scalars + 2, tl.where(tokens > 0, kl / denominator, float("nan")).to(tl.float32))
    tl.store(scalars + 3, (clipped / denominator).to(tl.float32))
    if moments is not None:
        tl.store(totals, tokens)
        tl.store(totals + 1, tl.sum(demos))
        tl.store(totals + 2, kl)
        tl.store(totals + 3, clipped)
        tl.store(totals + 4, tl.sum(rollout_entropy))
        tl.store(totals + 5, tl.sum(demo_entropy))
        merge_moments(sums, lengths, is_demo, moments, S, BLOCK)


def reduce(tokens: Tokens, terms: TokenTerms, moments: bool) -> Summary:
    if tokens.role_per_token:
        return reference.reduce(tokens, terms, moments)
    device, sequences = tokens.live.device, tokens.is_demo.numel()
    new = lambda *shape: torch.empty(shape, dtype=torch.float64, device=device)  # noqa: E731 - one line
    sums = new(SUMS, sequences)
    statistics = TokenMoments(new(7), new(sequences), new(6)) if moments else None
    # not a view: callers may change it in place
    loss = torch.empty((), dtype=torch.float32, device=device)
    scalars = torch.empty(4, dtype=torch.float32, device=device)
    sequence_launch(tokens, terms, sums, statistics).run(device)
    merge_launch(tokens, sums, loss, scalars, statistics).run(device)
    return Summary(loss, scalars[0], scalars[1], scalars[2], scalars[3], statistics)


def sequence_launch(
    tokens: Tokens, terms: TokenTerms, sums: Tensor, statistics: TokenMoments | None
) -> launch.Launch:
    """The launch of `sequence_kernel`.

    The kernel writes `sums` float64 [SUMS, S] and the mean negative log-likelihoods of the
    demonstrations.
    """
    names = ("live", "advantages", "weight", "offsets", "lengths", "is_demo")
    arguments = {
        **{name: getattr(tokens, name).contiguous() for name in names},
        **{name: x.contiguous() for name, x in terms._asdict().items()},
        "sums": sums,
        "demo_nll": None if statistics is None else statistics.demo_nll,
        "S": tokens.is_demo.numel(),
        "BLOCK": launch.BLOCK,
    }
    return launch.Launch(sequence_kernel, tokens.is_demo.numel(), arguments, _WARPS)


def merge_launch(
    tokens: Tokens, sums: Tensor, loss: Tensor, scalars: Tensor, statistics: TokenMoments | None
) -> launch.Launch:
    """The launch of `merge_kernel`, which writes the loss, four other scalars and the moments."""
    arguments = {
        "sums": sums,
        "lengths": tokens.lengths.contiguous(),
        "is_demo": tokens.is_demo.contiguous(),
        **launch.mu_arguments(tokens.mu),
        "mixed": loss,
        "scalars": scalars,
        "moments": None if statistics is None else statistics.rollouts,
        "totals": None if statistics is None else statistics.totals,
        "S": tokens.is_demo.numel(),
        "HAS_REF": tokens.ref is not None,
        "BLOCK": launch.BLOCK // 2,  # it accumulates eight sums at once
    }
    return launch.Launch(merge_kernel, 1, arguments, _WARPS)
