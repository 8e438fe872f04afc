"""Decides whether a loss needs the current log-probs first, and runs one or two passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from .contract import LossSpec
from .reference import Coupling, coupling, linearize, token_terms
from .tokens import Tokens, TokenTerms, scale_for_float16


class HasTerms(Protocol):
    """The result of a pass."""

    @property
    def terms(self) -> TokenTerms: ...


Result = TypeVar("Result", bound=HasTerms)


def in_passes(
    tokens: Tokens,
    spec: LossSpec,
    need_gradient: bool,
    logprobs: Callable[[], tuple[Tensor, Tensor]],
    one_pass: Callable[[Tokens, LossSpec], Result],
) -> tuple[Result | None, TokenTerms]:
    """Compute the token terms and, with `one_pass`, the gradient of sum(tokens.scale * loss).

    Args:
        tokens: the batch.
        spec: the options.
        need_gradient: False: the log-probs may be enough, and the first result is None.
        logprobs: computes logps and entropy, [N] each.
        one_pass: processes each token on its own.
    """
    match coupling(tokens, spec):
        case Coupling.NONE:
            # a sequence ratio that is not coupled is 1 or unused
            one_ratio = (
                spec
                if spec.importance_sampling_level == "token"
                else replace(spec, importance_sampling_level="token")
            )
            result = one_pass(tokens, one_ratio)
            return result, result.terms
        case Coupling.KNOWN:
            result = one_pass(*linearize(tokens, spec))
            return result, token_terms(result.terms.logps, result.terms.entropy, tokens, spec)
        case _:
            logps, entropy = logprobs()
            terms = token_terms(logps, entropy, tokens, spec)
            if not need_gradient:
                return None, terms
            return one_pass(*linearize(tokens, spec, logps)), terms


class LogitsLoss(NamedTuple):
    """Result of `logits_loss`."""

    terms: TokenTerms
    inv_scale: Tensor | None  # the gradient is divided by it; see `scale_for_float16`


def logits_loss(
    logits: Tensor,  # [B, T, V]
    tokens: Tokens,
    spec: LossSpec,
    backend: Any,
    out: Tensor | None,
    softcap: float | None,
) -> LogitsLoss:
    """Compute the token terms and, in `out`, the gradient of the logits."""

    def logprobs() -> tuple[Tensor, Tensor]:
        stats = backend.row_stats(logits, tokens.targets, spec.temperature, softcap)
        return stats[0], stats[1]

    def one_pass(tokens: Tokens, spec: LossSpec) -> LogitsLoss:
        inv_scale, scaled = scale_for_float16(tokens, spec, logits.dtype)
        terms = backend.row_loss(logits, scaled, spec, out, None, softcap)
        return LogitsLoss(terms, inv_scale)

    need_gradient = out is not None
    result, terms = in_passes(tokens, spec, need_gradient, logprobs, one_pass)
    return LogitsLoss(terms, None if result is None else result.inv_scale)
