"""The sums over a batch, in two launches: those of each sequence, then those of all sequences.

Each sequence is processed by one program and all of them by another, in float64 and in a fixed
order. In PyTorch the same sums take about 70 launches: half of the host's time in a small loss.
Notation: N tokens, S sequences.
"""

import torch
import triton
import triton.language as tl

from ...contract import LossOutput, TokenMoments
from ...tokens import Tokens, TokenTerms
from . import launch
from .plan import mixing_weights

_WARPS, _SEQUENCES = 8, 128  # sequences per iteration of `totals_kernel`
# for each sequence: the six totals of `TokenMoments.totals`, the loss of its rollout tokens and of
# its demonstration tokens; whether it has rollout tokens, their mean s and r, and their centered
# sums ss, rr and sr divided by their number
COLUMNS = tl.constexpr(14)
_INPUTS = ["live", "demo", "advantages", "weight", *TokenTerms._fields]


@triton.jit
def rollout_values(live, demo, advantages, logps, i, inside):
    """Whether each token is a rollout's, and its s = p (1 - p) and r; 0 for the other tokens."""
    has_loss = tl.load(live + i, mask=inside, other=0) != 0
    rollout = tl.where(tl.load(demo + i, mask=inside, other=0) != 0, False, has_loss)
    p = tl.exp(tl.load(logps + i, mask=rollout, other=0.0).to(tl.float64))
    r = tl.load(advantages + i, mask=rollout, other=0.0).to(tl.float64)
    return has_loss, rollout, p * (1.0 - p), r


@triton.jit(
    do_not_specialize=["S"],
    do_not_specialize_on_alignment=[*_INPUTS, "offsets", "sums", "nll"],
)
def sequences_kernel(
    live,  # bool [N]
    demo,  # bool [N]
    advantages,  # float32 [N]
    weight,  # float32 [N]
    logps,  # float32 [N], like the next four
    entropy,
    loss,
    kl,
    clipped,
    offsets,  # int64 [S + 1]
    sums,  # float64 [COLUMNS, S]
    nll,  # float64 [S]: see `TokenMoments.demo_nll`
    S,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + s)
    end = tl.load(offsets + s + 1)
    zeros = tl.zeros([BLOCK], tl.float64)
    rollouts, demos, rollout_loss, demo_loss = zeros, zeros, zeros, zeros
    divergence, clips, rollout_entropy, demo_entropy = zeros, zeros, zeros, zeros
    demo_logps, phis, rewards = zeros, zeros, zeros
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        has_loss, rollout, phi, r = rollout_values(live, demo, advantages, logps, i, inside)
        demonstration = tl.where(rollout, False, has_loss)
        weighted = tl.load(weight + i, mask=has_loss, other=0.0) * tl.load(
            loss + i, mask=has_loss, other=0.0
        )
        nats = tl.load(entropy + i, mask=has_loss, other=0.0).to(tl.float64)
        logp = tl.load(logps + i, mask=demonstration, other=0.0).to(tl.float64)
        rollouts += tl.where(rollout, 1.0, 0.0)
        demos += tl.where(demonstration, 1.0, 0.0)
        rollout_loss += tl.where(rollout, weighted.to(tl.float64), 0.0)
        demo_loss += tl.where(demonstration, weighted.to(tl.float64), 0.0)
        divergence += tl.load(kl + i, mask=inside, other=0.0).to(tl.float64)
        clips += tl.load(clipped + i, mask=inside, other=0.0).to(tl.float64)
        rollout_entropy += tl.where(rollout, nats, 0.0)
        demo_entropy += tl.where(demonstration, nats, 0.0)
        demo_logps += logp
        phis += phi
        rewards += r
    count = tl.sum(rollouts)
    demo_count = tl.sum(demos)
    share = 1.0 / tl.where(count == 0, 1.0, count)
    mean_phi = tl.sum(phis) * share
    mean_r = tl.sum(rewards) * share
    ss, rr, sr = zeros, zeros, zeros
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        _, rollout, phi, r = rollout_values(live, demo, advantages, logps, i, i < end)
        phi = tl.where(rollout, phi - mean_phi, 0.0)
        r = tl.where(rollout, r - mean_r, 0.0)
        ss += phi * phi
        rr += r * r
        sr += phi * r
    column = sums + s
    tl.store(column, count)
    tl.store(column + S, demo_count)
    tl.store(column + 2 * S, tl.sum(divergence))
    tl.store(column + 3 * S, tl.sum(clips))
    tl.store(column + 4 * S, tl.sum(rollout_entropy))
    tl.store(column + 5 * S, tl.sum(demo_entropy))
    tl.store(column + 6 * S, tl.sum(rollout_loss))
    tl.store(column + 7 * S, tl.sum(demo_loss))
    tl.store(column + 8 * S, tl.where(count == 0, 0.0, 1.0))
    tl.store(column + 9 * S, mean_phi)
    tl.store(column + 10 * S, mean_r)
    tl.store(column + 11 * S, tl.sum(ss) * share)
    tl.store(column + 12 * S, tl.sum(rr) * share)
    tl.store(column + 13 * S, tl.sum(sr) * share)
    mean_nll = -tl.sum(demo_logps) / tl.where(demo_count == 0, 1.0, demo_count)
    tl.store(nll + s, tl.where(demo_count == 0, float("-inf"), mean_nll))


@triton.jit
def pick(values, columns, column):
    """One element of `values`."""
    return tl.sum(tl.where(columns == column, values, 0.0))


@triton.jit
def share(weight, loss):
    """The part of a term in the loss; a term of weight 0 has none, even if it is infinite."""
    infinite = tl.abs(loss) == float("inf")
    return tl.where((weight == 0) & infinite, 0.0, weight.to(tl.float64) * loss)


@triton.jit(
    do_not_specialize=["S"],
    do_not_specialize_on_alignment=["sums", "mu", "loss", "scalars", "totals", "rollouts"],
)
def totals_kernel(
    sums,  # float64 [COLUMNS, S]
    mu,  # float32, 0-d, or None: use the next two arguments
    mu_number,
    one_minus_mu_number,
    loss,  # float32, 0-d
    scalars,  # float32 [4]: the next fields of LossOutput
    totals,  # float64 [6]: of TokenMoments, like the next one
    rollouts,  # float64 [7]
    S,
    HAS_REF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, 16)
    parts = tl.zeros([16, BLOCK], tl.float64)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        used = (column[:, None] < COLUMNS) & (s[None, :] < S)
        parts += tl.load(sums + column[:, None] * S + s[None, :], mask=used, other=0.0)
    values = tl.sum(parts, 1)
    if not HAS_REF:
        values = tl.where(column == 2, float("nan"), values)
    n = pick(values, column, 8)
    mean_phi = pick(values, column, 9) / tl.where(n == 0, 1.0, n)
    mean_r = pick(values, column, 10) / tl.where(n == 0, 1.0, n)
    ss = tl.zeros([BLOCK], tl.float64)
    rr = tl.zeros([BLOCK], tl.float64)
    sr = tl.zeros([BLOCK], tl.float64)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        has_rollout = tl.load(sums + 8 * S + s, mask=s < S, other=0.0) != 0
        phi = tl.load(sums + 9 * S + s, mask=has_rollout, other=0.0) - mean_phi
        r = tl.load(sums + 10 * S + s, mask=has_rollout, other=0.0) - mean_r
        ss += tl.where(has_rollout, phi * phi, 0.0)
        rr += tl.where(has_rollout, r * r, 0.0)
        sr += tl.where(has_rollout, phi * r, 0.0)
    between = tl.sum(rr)
    tl.store(totals + column, values, mask=column < 6)
    tl.store(rollouts, n)
    tl.store(rollouts + 1, mean_phi)
    tl.store(rollouts + 2, mean_r)
    tl.store(rollouts + 3, pick(values, column, 11) + tl.sum(ss))
    tl.store(rollouts + 4, pick(values, column, 12) + between)
    tl.store(rollouts + 5, pick(values, column, 13) + tl.sum(sr))
    tl.store(rollouts + 6, between)
    demo_weight, rollout_weight = mixing_weights(mu, mu_number, one_minus_mu_number)
    rollout_loss = pick(values, column, 6)
    demo_loss = pick(values, column, 7)
    mixed = share(rollout_weight, rollout_loss) + share(demo_weight, demo_loss)
    count = pick(values, column, 0)
    divisor = tl.where(count == 0, 1.0, count)
    kl = tl.where(count == 0, float("nan"), pick(values, column, 2) / divisor)
    tl.store(loss, mixed.to(tl.float32))
    tl.store(scalars, rollout_loss.to(tl.float32))
    tl.store(scalars + 1, demo_loss.to(tl.float32))
    tl.store(scalars + 2, kl.to(tl.float32))
    tl.store(scalars + 3, (pick(values, column, 3) / divisor).to(tl.float32))


def reduce_by_kernels(tokens: Tokens, terms: TokenTerms, moments: bool) -> LossOutput:
    device, sequences = terms.loss.device, len(tokens.lengths)
    sums = torch.empty(COLUMNS.value, sequences, dtype=torch.float64, device=device)
    nll = torch.empty(sequences, dtype=torch.float64, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)  # no view: users may modify it
    scalars = torch.empty(4, dtype=torch.float32, device=device)
    totals, rollouts = (torch.empty(n, dtype=torch.float64, device=device) for n in (6, 7))
    columns = {name: getattr(tokens, name) for name in _INPUTS[:4]} | terms._asdict()
    common = {"sums": sums, "S": sequences}
    arguments = {
        **launch.dense(**columns),
        **common,
        "offsets": tokens.offsets,
        "nll": nll,
        "BLOCK": launch.BLOCK,
    }
    launch.Launch(sequences_kernel, sequences, arguments, _WARPS).run(device)
    arguments = {
        **common,
        **launch.mixing(tokens.mu),
        "loss": loss,
        "scalars": scalars,
        "totals": totals,
        "rollouts": rollouts,
        "HAS_REF": tokens.ref is not None,
        "BLOCK": _SEQUENCES,
    }
    launch.Launch(totals_kernel, 1, arguments, _WARPS).run(device)
    found = TokenMoments(rollouts, nll, totals) if moments else None
    rollout_loss, demo_loss, kl, clip_fraction = scalars.unbind()
    return LossOutput(
        loss=loss,
        rollout_loss=rollout_loss,
        demo_loss=demo_loss,
        kl=kl,
        clip_fraction=clip_fraction,
        logps=terms.logps,
        entropy=terms.entropy,
        moments=found,
    )
