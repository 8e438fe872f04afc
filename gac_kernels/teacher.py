"""Rows with a teacher's K tokens: their log-probabilities, that of the rest, and the gradient.

The rest of the vocabulary, all tokens that the teacher does not name, is one more outcome, of
probability p_R. A function of the log-probabilities of the sampled token y, of the K tokens and of
the rest, with derivatives f_y, f_k and f_R, whose sum is f, has in a row's scaled logits the
gradient

    f_j + [j = y] f_y - p_j f              of one of the K tokens
    [j = y] f_y - p_j (f - f_R / p_R)      of another one

This is a multiple of the softmax, which the backends' row kernels write, except at 1 + K entries.
log p_R comes from the logsumexp of the rest alone: 1 - sum p_k would have no digits where a model
is sure. The logsumexp and the entropy of the row follow from those of the rest, so the kernels read
a row as often as without a teacher.
Notation: M rows, V vocabulary size, K tokens of the teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .candidates import CandidateRows, Candidates, distinct, write_gradient
from .contract import IGNORE, LossSpec, compute_dtype
from .reference import LEAST_REST
from .tokens import Scaling, Tokens, TokenTerms, Upstream


class TeacherRows(CandidateRows):
    """Backend (see `backends`) for the targets `Tokens.row_targets`, [M, K + 2].

    Its `lse` is the logsumexp of the rest.
    """

    def row_stats(
        self,
        logits: Tensor,  # [1, M, V]
        targets: Tensor,
        scaling: Scaling,
        *,
        more_outputs: bool = False,
    ) -> tuple[Tensor, ...]:
        assert not more_outputs, "the mixed loss needs no further outputs"
        x, tokens = logits[0], self._tokens(logits, targets, scaling)
        index, found = distinct(tokens.ids[:, 1:], x.shape[1])
        named = x.gather(1, index)
        x.scatter_(1, index, named.masked_fill(found, -math.inf))
        _, rest_entropy, rest_lse = self.inner.row_stats(logits, _without(targets), scaling)
        x.scatter_(1, index, named)
        logps, _ = _log_probs(tokens, rest_lse)
        parts = -logps[:, 1:]  # in nats: the K tokens and the rest
        parts[:, -1] += rest_entropy
        share = logps[:, 1:].exp()
        share[:, :-1].masked_fill_(tokens.ids[:, 1:] == IGNORE, 0)
        entropy = torch.where(share == 0, 0, share * parts).sum(1)
        live = targets[:, 0] != IGNORE
        results = torch.where(live[:, None], logps, 0), torch.where(live, entropy, 0)
        return *(x.to(rest_lse.dtype) for x in results), rest_lse

    def row_grads(
        self,
        logits: Tensor,  # [1, M, V]
        targets: Tensor,
        scaling: Scaling,
        upstream: Upstream,
        out: Tensor,  # [1, M, V], may be the logits
    ) -> None:
        tokens = self._tokens(logits, targets, scaling)
        logps, lse = _log_probs(tokens, upstream.lse)
        total, share = upstream.d_logps.sum(1), logps[:, -1].exp().clamp(min=LEAST_REST)
        of_rest = total - (upstream.d_logps[:, -1] / share).to(total.dtype)
        passed = upstream._replace(lse=lse.to(total.dtype), d_logps=of_rest)
        self.inner.row_grads(logits, _without(targets), scaling, passed, out, whole_row=False)
        tokens = tokens._replace(logps=logps[:, :-1].to(total.dtype))
        d_logps, ids = upstream.d_logps[:, :-1], tokens.ids
        shared = total[:, None].expand_as(d_logps).clone()
        # the sampled token is one of the K tokens, or one of the rest
        shared[:, 0] = torch.where((ids[:, :1] == ids[:, 1:]).any(1), total, of_rest)
        write_gradient(out[0], tokens, upstream._replace(d_logps=d_logps), shared)

    def row_loss(
        self,
        logits: Tensor,  # [1, M, V]
        tokens: Tokens,
        spec: LossSpec,
        out: Tensor | None,
        *,
        softcap: float | None = None,
    ) -> TokenTerms:
        if spec.teacher_coef != 0:
            return super().row_loss(logits, tokens, spec, out, softcap=softcap)
        # the teacher's term is only reported; the gradient may overwrite the logits
        temperature = spec.temperature if tokens.temperature is None else tokens.temperature
        logps, _, _ = self.row_stats(logits, tokens.row_targets, Scaling(temperature, softcap))
        plain = tokens._replace(teacher=None)
        terms = self.inner.row_loss(logits, plain, spec, out, softcap=softcap)
        logps[:, 0] = terms.logps
        return terms._replace(logps=logps)

    def _tokens(self, logits: Tensor, targets: Tensor, scaling: Scaling) -> Candidates:
        """The sampled and the teacher's tokens, with scaled logits instead of log-probabilities."""
        zeros = logits.new_zeros(len(targets), dtype=compute_dtype(logits.dtype))
        return self.candidates(logits[0], targets[:, :-1], zeros, scaling)


def _without(targets: Tensor) -> Tensor:
    """[M] targets of rows for a kernel that looks up none."""
    return torch.where(targets[:, 0] == IGNORE, IGNORE, -1)


def _log_probs(tokens: Candidates, rest_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Of the sampled token, the K tokens and the rest, [M, K + 2], and the row's logsumexp.

    Both are float64; 0 where there is no token. tokens: with scaled logits in place of log-probs.
    """
    z, rest, absent = tokens.logps.double(), rest_lse.double(), tokens.ids == IGNORE
    named = z[:, 1:].masked_fill(absent[:, 1:], -math.inf).logsumexp(1)
    lse = torch.logaddexp(named, rest)
    lse = torch.where(lse == math.inf, math.nan, lse)  # an error, not a token of probability 1
    logps = torch.cat([z, rest[:, None]], 1) - lse[:, None]
    logps[:, :-1].masked_fill_(absent, 0)
    return logps, lse
