"""Divergences between a student's and a teacher's whole distributions, without their logits.

The logits of both models exist for one block of rows at a time. Because all of them are there, one
pass gives the divergence and its gradient: 6 N H_s V + 2 N H_t V FLOPs.
Notation: N tokens, V vocabulary size, H_s and H_t hidden sizes of student and teacher, M rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .linear import begin, blocks
from .projection import Head, Projection, Result, in_smaller_chunks
from .tokens import NeedsGrad, Operands, Scaling, power_above, sort_tokens

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
# A part of a block whose logits stay in a processor's cache while the row functions read them.
PART_BYTES = {"cpu": 1 << 20}
# Log-probability of a masked vocabulary entry. Unlike -inf, it can be subtracted from itself and
# multiplied by 0; a divergence above INFINITE is one of an entry that only one model masks.
MIN_LOG_PROB, INFINITE = -1e37, 1e15


class DivergenceSpec(NamedTuple):
    """Which divergence, between which distributions."""

    divergence: str  # of DIVERGENCES
    beta: float  # share of the teacher in the mixture of "jsd"


@in_smaller_chunks
def divergence_loss(
    op: Operands,
    teacher: Operands,  # not differentiated; its targets are not used
    spec: DivergenceSpec,
    weights: Tensor | None,  # [N], float32 or better; None: 1
    needs: NeedsGrad,
) -> Result:
    """Compute the weighted sum of the divergences and its gradients.

    Outputs: the sum, the divergences [N] and the student's entropies [N].
    """
    live = op.live
    has_gradient = live if weights is None else live & (weights != 0)
    factors, inv_scale = _scaled(op, weights)
    head = Head(op, needs)
    assert teacher.weight is not None
    frozen = Projection(teacher.weight, teacher.bias, teacher.dtype, op.chunk_bytes)
    frozen.block = head.projection.block
    order = sort_tokens(live, has_gradient if any(needs) else None)
    results = op.results(2)
    order, first = begin(head, order)
    for block in blocks(head, order, first):
        index = order.tokens_of(block.tokens)
        rows = frozen.operand(teacher.rows[index])
        student = Logits(block.logits[0], op.scaling.at(index))
        other = Logits(frozen.logits(rows), teacher.scaling.at(index))
        rows_factor = None if factors is None else factors[index]
        out = None if block.out is None else block.out[0]
        for span in _parts(student.x):
            factor = None if rows_factor is None else rows_factor[span]
            grad = None if out is None else out[span]
            values = row_divergence(student.part(span), other.part(span), spec, factor, grad)
            results[:, block.tokens][:, span] = torch.stack(values)
        if out is not None and order.masked is not None:  # rows without a gradient, too
            out.masked_fill_(~has_gradient[index, None], 0)
    losses, entropy = torch.where(live, order.restore(results), 0)
    weighted = losses if weights is None else torch.where(has_gradient, losses * weights, 0)
    total = weighted.sum(dtype=torch.float64).to(losses.dtype)
    return Result((total, losses, entropy), head.gradients(), inv_scale)


def _scaled(op: Operands, weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The factors of the rows' gradients, and for float16 GEMMs what these are divided by.

    The gradient of a divergence in a logit is at most a few tens, but tiny if the weights are.
    """
    if op.dtype != torch.float16:
        return weights, None
    if weights is None:
        weights = torch.ones(len(op.targets), dtype=torch.float32, device=op.rows.device)
    inv_scale = power_above((weights / op.scaling.temperature).abs())
    return weights / inv_scale, inv_scale


class Logits(NamedTuple):
    """Logits of consecutive rows, and how their distributions are computed."""

    x: Tensor  # [M, V]; overwritten
    scaling: Scaling

    def part(self, span: slice) -> Logits:
        """The rows in `span`."""
        return Logits(self.x[span], self.scaling.at(span))

    def softmax_(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Overwrite the logits with log-probabilities.

        Returns the probabilities, the log-probabilities and, with a softcap, its derivative, each
        [M, V].
        """
        x, derivative = self.x, None
        temperature, softcap = self.scaling
        if softcap is not None:
            infinite = x.isinf()  # infinite logits are not capped
            capped = (x / softcap).tanh_()
            derivative = (1 - capped * capped).masked_fill_(infinite, 0)
            torch.where(infinite, x, capped.mul_(softcap), out=x)
        if isinstance(temperature, Tensor):
            x.div_(temperature[:, None])
        elif temperature != 1:
            x.div_(temperature)
        x.sub_(x.amax(-1, keepdim=True))
        p = x.exp()
        total = p.sum(-1, keepdim=True)
        p.div_(total)
        return p, x.sub_(total.log_()).clamp_(min=MIN_LOG_PROB), derivative


def row_divergence(
    student: Logits,
    teacher: Logits,
    spec: DivergenceSpec,
    factor: Tensor | None,  # [M]
    out: Tensor | None,  # [M, V], may be `student.x`
) -> tuple[Tensor, Tensor]:
    """Compute the divergence and the student's entropy of each row, [M]; overwrites the logits.

    Writes to `out` the gradient of `factor * divergence` with respect to the student's logits.
    """
    q, log_q, derivative = student.softmax_()
    p, log_p, _ = teacher.softmax_()
    entropy = -_expectation(q, log_q)
    match spec.divergence:
        case "forward_kl":  # sum p (log p - log q)
            losses = _expectation(p, log_p.sub_(log_q))
            grad = q.sub_(p)
        case "reverse_kl":  # sum q (log q - log p)
            gap = log_q.sub_(log_p)
            losses = _expectation(q, gap)
            grad = gap.sub_(losses[:, None]).mul_(q)
        case _:  # beta KL(p, m) + (1 - beta) KL(q, m), m = (1 - beta) q + beta p
            log_m = torch.lerp(q, p, spec.beta).clamp_(min=torch.finfo(q.dtype).tiny).log_()
            student_kl = _expectation(q, log_q.sub_(log_m))
            teacher_kl = _expectation(p, log_p.sub_(log_m))
            losses = spec.beta * teacher_kl + (1 - spec.beta) * student_kl
            grad = log_q.sub_(student_kl[:, None]).mul_(q).mul_(1 - spec.beta)
    losses = torch.where(losses > INFINITE, math.inf, losses)
    if out is not None:
        if derivative is not None:
            grad.mul_(derivative)
        scale = torch.ones_like(losses) if factor is None else factor.to(losses.dtype)
        torch.mul(grad, (scale / student.scaling.temperature)[:, None], out=out)
    return losses, entropy


def _expectation(p: Tensor, value: Tensor) -> Tensor:
    """Sum of p * value over the vocabulary, [M]."""
    return torch.linalg.vecdot(p, value)


def _parts(rows: Tensor) -> Iterator[slice]:
    """Split the rows of a block into parts that fit in a processor's cache."""
    count = PART_BYTES.get(rows.device.type, 0) // (rows.shape[1] * rows.element_size())
    step = max(count, 1) if rows.device.type in PART_BYTES else max(len(rows), 1)
    for start in range(0, len(rows), step):
        yield slice(start, min(start + step, len(rows)))
