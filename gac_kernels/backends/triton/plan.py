"""Token weights, in two launches: first the sequence lengths, then all per-token values.

Each sequence is processed by one program, or by several if it is long; there are no atomic adds.
Notation: N tokens, S sequences, T row length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import reference
from ...contract import DemoWeight, LossSpec
from ...tokens import BatchInputs, Tokens
from . import launch
from .softmax import NO_LOSS

_WARPS = 4
_SHARED = 16  # maximum number of programs per sequence in `tokens_kernel`
# pointers that need not be aligned, because they are often slices
_INPUTS = ["targets", "advantages", "is_demo", "mu", "old", "ref", "rollout_norm", "demo_norm"]
_OUTPUTS = ["offsets", "lengths", "live", "demo", "sequence", "floats"]


@triton.jit
def has_demo_role(is_demo, s, inside, ALL_DEMO: tl.constexpr):
    """Whether sequences s are demonstrations; without `is_demo`, all or none of them are."""
    if is_demo is not None:
        role = tl.load(is_demo + s, mask=inside, other=0) != 0
    elif ALL_DEMO:
        role = inside
    else:
        role = inside != inside
    return role


@triton.jit(
    do_not_specialize=["N", "T", "S"],
    do_not_specialize_on_alignment=[
        "targets",
        "is_demo",
        "cu_seqlens",
        "offsets",
        "lengths",
        "rollout_lengths",
    ],
)
def lengths_kernel(
    targets,  # int64 [N]
    is_demo,  # bool [S], or None: ALL_DEMO
    cu_seqlens,  # int [S + 1], or None: sequences of T tokens
    offsets,  # int64 [S + 1]: the start of each sequence and the end of the last one
    lengths,  # int64 [S]: tokens with a loss
    rollout_lengths,  # int64 [S]: those of rollouts
    N: tl.int64,
    T: tl.int64,
    S,
    ALL_DEMO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    if cu_seqlens is not None:
        # nobody has checked these values: stay within the N tokens
        begin = tl.load(cu_seqlens + s).to(tl.int64)
        begin = tl.where(begin < 0, 0, tl.where(begin > N, N, begin))
        end = tl.load(cu_seqlens + s + 1).to(tl.int64)
        end = tl.where(end < begin, begin, tl.where(end > N, N, end))
    else:
        begin = s * T
        end = begin + T
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count += tl.load(targets + i, mask=i < end, other=NO_LOSS) != NO_LOSS
    length = tl.sum(count)
    role = has_demo_role(is_demo, s, s < S, ALL_DEMO)
    tl.store(lengths + s, length)
    tl.store(rollout_lengths + s, tl.where(role, 0, length))
    tl.store(offsets + s, begin)
    if s == S - 1:
        tl.store(offsets + S, end)


@triton.jit
def token_weight(
    length,
    lengths,
    is_demo,
    S,
    norm,
    number,
    max_tokens,
    ALL_DEMO: tl.constexpr,
    DEMO_TERM: tl.constexpr,
    REDUCTION: tl.constexpr,
    FROM_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weight of each token of a sequence of `length` tokens, float32; 0 if the denominator is 0.

    DEMO_TERM: the sequence is a demonstration. FROM_BATCH: the denominator is counted in the batch.
    """
    if norm is not None:
        total = tl.load(norm).to(tl.float64)
    elif FROM_BATCH:
        parts = tl.zeros([BLOCK], tl.int64)
        for start in range(0, S, BLOCK):
            j = start + tl.arange(0, BLOCK)
            tokens = tl.load(lengths + j, mask=j < S, other=0)
            in_term = (j < S) & (has_demo_role(is_demo, j, j < S, ALL_DEMO) == DEMO_TERM)
            if REDUCTION == "token":
                parts += tl.where(in_term, tokens, 0)
            elif REDUCTION == "sequence":
                parts += (in_term & (tokens > 0)).to(tl.int64)
            else:
                parts += in_term.to(tl.int64)
        total = tl.sum(parts).to(tl.float64)
    else:
        total = tl.full([], 0.0, tl.float64) + number
    if REDUCTION == "sequence":
        total *= length.to(tl.float64)
    elif REDUCTION == "constant":
        total *= max_tokens
    empty = total == 0
    return tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total)).to(tl.float32)


@triton.jit
def mixing_weights(mu, mu_number, one_minus_mu_number):
    """mu and 1 - mu in float32; the numbers if the pointer `mu` is None."""
    if mu is not None:
        demo_weight = tl.load(mu).to(tl.float32)
        rollout_weight = 1.0 - demo_weight
    else:
        demo_weight = tl.full([], 0.0, tl.float32) + mu_number
        rollout_weight = tl.full([], 0.0, tl.float32) + one_minus_mu_number
    return demo_weight, rollout_weight


@triton.jit
def clear_tokens(start, end, live, demo, sequence, floats, N, BLOCK: tl.constexpr):
    """The values of tokens that belong to no sequence."""
    for begin in range(start, end, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < end
        tl.store(live + i, inside != inside, mask=inside)
        tl.store(demo + i, inside != inside, mask=inside)
        tl.store(sequence + i, tl.zeros([BLOCK], tl.int64), mask=inside)
        for column in tl.static_range(5):
            tl.store(floats + column * N + i, tl.zeros([BLOCK], tl.float32), mask=inside)


@triton.jit(
    do_not_specialize=["S", "P"],
    do_not_specialize_on_alignment=_INPUTS + _OUTPUTS,
)
def tokens_kernel(
    targets,  # int64 [N]
    advantages,  # [S] or [N], any float; None: all are 0
    is_demo,  # bool [S], or None: ALL_DEMO
    old,  # [N], any float, or None
    ref,  # [N], any float, or None
    mu,  # 0-d, or None: use `mu_number`
    rollout_norm,  # 0-d, or None: use `rollout_number`, or the batch's own count if ROLLOUT_OWN
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
    one_minus_mu_number,  # 1 - mu
    rollout_number,
    demo_number,
    max_tokens,
    ALL_DEMO: tl.constexpr,
    PACKED: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    SHAPED: tl.constexpr,
    ROLLOUT: tl.constexpr,
    DEMO: tl.constexpr,
    ROLLOUT_FROM_BATCH: tl.constexpr,
    DEMO_FROM_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = (tl.program_id(0) // P).to(tl.int64)
    part = tl.program_id(0) % P
    begin = tl.load(offsets + s)
    end = tl.load(offsets + s + 1)
    length = tl.load(lengths + s)
    if PACKED:  # the sequences may not cover all tokens, as in a batch with padding at its end
        if (s == 0) & (part == 0):
            clear_tokens(0, begin, live, demo, sequence, floats, N, BLOCK)
        if (s == S - 1) & (part == 0):
            clear_tokens(end, N, live, demo, sequence, floats, N, BLOCK)
    d = has_demo_role(is_demo, s, s < S, ALL_DEMO)
    term_weight, one_minus_mu = mixing_weights(mu, mu_number, one_minus_mu_number)
    if d:
        w = token_weight(
            length,
            lengths,
            is_demo,
            S,
            demo_norm,
            demo_number,
            max_tokens,
            ALL_DEMO,
            True,
            DEMO,
            DEMO_FROM_BATCH,
            BLOCK,
        )
    else:
        w = token_weight(
            length,
            lengths,
            is_demo,
            S,
            rollout_norm,
            rollout_number,
            max_tokens,
            ALL_DEMO,
            False,
            ROLLOUT,
            ROLLOUT_FROM_BATCH,
            BLOCK,
        )
        term_weight = one_minus_mu
    for start in range(begin + part * BLOCK, end, P * BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        has_loss = tl.load(targets + i, mask=inside, other=NO_LOSS) != NO_LOSS
        rollout = tl.where(
            d, False, has_loss
        )  # `& (d == 0)` fails in the interpreter of Triton 3.9
        uses_advantage = has_loss if SHAPED else rollout
        advantage = tl.zeros([BLOCK], tl.float32)
        if advantages is not None:
            index = i * 0 + s if PER_SEQUENCE else i
            advantage = tl.load(advantages + index, mask=uses_advantage, other=0.0).to(tl.float32)
        weight = tl.where(has_loss, w, 0.0)
        tl.store(live + i, has_loss, mask=inside)
        tl.store(demo + i, inside & d, mask=inside)
        tl.store(sequence + i, i * 0 + s, mask=inside)
        tl.store(floats + i, advantage, mask=inside)
        tl.store(floats + N + i, weight, mask=inside)
        tl.store(floats + 2 * N + i, weight * term_weight, mask=inside)
        if old is not None:
            value = tl.load(old + i, mask=rollout, other=0.0).to(tl.float32)
            tl.store(floats + 3 * N + i, value, mask=inside)
        if ref is not None:
            value = tl.load(ref + i, mask=rollout, other=0.0).to(tl.float32)
            tl.store(floats + 4 * N + i, value, mask=inside)


def plan_by_kernels(inputs: BatchInputs, spec: LossSpec, dtype: torch.dtype) -> Tokens:
    inputs = inputs.to_targets_device()
    targets, mu, cu_seqlens = inputs.targets, inputs.mu, inputs.cu_seqlens
    device, n, sequences = targets.device, targets.numel(), inputs.sequences
    if n == 0 or not inputs.is_per_sequence(inputs.is_demo):
        return reference.plan(inputs, spec, dtype)
    flat = targets.reshape(-1).contiguous()
    sizes = n, sequences + 1, sequences, sequences  # int64, of 8 bytes; then float32 and bool
    allocate = torch.empty if sequences else torch.zeros  # the kernels have a program per sequence
    memory = allocate(8 * sum(sizes) + 4 * 5 * n + 2 * n, dtype=torch.uint8, device=device)
    wide, narrow, bits = memory.split([8 * sum(sizes), 4 * 5 * n, 2 * n])
    sequence, offsets, lengths, rollout_lengths = wide.view(torch.int64).split(sizes)
    floats, (live, demo) = narrow.view(torch.float32).view(5, n), bits.view(torch.bool).view(2, n)
    width = n if cu_seqlens is not None else targets.shape[1]
    roles = inputs.is_demo if isinstance(inputs.is_demo, Tensor) else None
    common = {
        "targets": flat,
        **launch.dense(is_demo=roles),
        "ALL_DEMO": inputs.is_demo is True,
        "offsets": offsets,
        "lengths": lengths,
        "N": n,
        "S": sequences,
    }
    layout = {
        **common,
        "rollout_lengths": rollout_lengths,
        "BLOCK": launch.BLOCK,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.contiguous(),
        "T": width,  # of padded sequences
    }
    launch.Launch(lengths_kernel, sequences, layout, _WARPS).run(device)
    mu = mu.to(dtype) if isinstance(mu, Tensor) else mu
    programs = min(-(-width // launch.BLOCK), _SHARED)
    rollout_norm, rollout_number = launch.number(inputs.rollout_norm)
    demo_norm, demo_number = launch.number(inputs.demo_norm)
    arguments = {
        **common,
        "BLOCK": launch.BLOCK,
        **launch.dense(advantages=inputs.advantages),
        **launch.dense(old=inputs.old_logps, ref=inputs.ref_logps),
        **launch.mixing(mu),
        "rollout_norm": rollout_norm,
        "demo_norm": demo_norm,
        "live": live,
        "demo": demo,
        "sequence": sequence,
        "floats": floats,
        "P": programs,
        "rollout_number": rollout_number,
        "demo_number": demo_number,
        "max_tokens": float(spec.max_tokens or 1),
        "PACKED": cu_seqlens is not None,
        "PER_SEQUENCE": inputs.is_per_sequence(inputs.advantages),
        "SHAPED": spec.demo_weight is DemoWeight.SHAPED,
        "ROLLOUT": spec.rollout_reduction,
        "DEMO": spec.demo_reduction,
        "ROLLOUT_FROM_BATCH": inputs.rollout_norm is None,
        "DEMO_FROM_BATCH": inputs.demo_norm is None,
    }
    launch.Launch(tokens_kernel, sequences * programs, arguments, _WARPS).run(device)
    advantages, weight, scale, old, ref = floats
    old, ref = (
        None if x is None else y for x, y in ((inputs.old_logps, old), (inputs.ref_logps, ref))
    )
    columns = *(flat, live, demo, advantages, old, ref, weight, scale), None, None, None, sequence
    return Tokens(*columns, offsets, lengths, rollout_lengths, mu)
