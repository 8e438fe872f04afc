"""Signal sources of the controller: the paper's proxies, and true gradients.

A source is a frozen dataclass with two pure functions: `init() -> state` and
`read(evidence, state) -> (reading, state)`. States are plain JSON types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import torch

from gac.errors import is_count, require
from gac.fields import Choice
from gac.types import Corrections, Evidence, State
from gac_kernels.contract import Signals


class Alignment(NamedTuple):
    """Unbiased estimates of the gradients' products in a common unit; nan where unknown."""

    inner: float
    """<g_s, g_r>."""
    inner_variance: float
    """Squared standard error of `inner`; an unbiased estimate, so it may be negative."""
    sft_square: float
    """`|g_s|^2` with the noise subtracted; may be negative."""
    rl_square: float
    """`|g_r|^2` with the noise subtracted; may be negative."""
    sft_total: float = math.nan
    """Measured `|g_s|^2`, noise included."""
    rl_total: float = math.nan
    """Measured `|g_r|^2`, noise included."""

    def normalized(self) -> Alignment:
        """The alignment after scaling both measured gradients to norm 1; `inner` is their cosine.

        The cosine is near 0 if the gradients are mostly noise, and 0 if either is zero.
        """
        size = math.sqrt(max(self.sft_total, 0.0)) * math.sqrt(max(self.rl_total, 0.0))
        if size == 0:
            return Alignment(
                inner=0.0,
                inner_variance=0.0,
                sft_square=1.0,
                rl_square=1.0,
                sft_total=1.0,
                rl_total=1.0,
            )
        return Alignment(
            inner=self.inner / size,
            inner_variance=self.inner_variance / size / size,
            sft_square=1.0,
            rl_square=1.0,
            sft_total=1.0,
            rl_total=1.0,
        )


def alignment(gram: torch.Tensor, sft_count: int) -> Alignment:
    """Estimate the alignment from inner products of independent micro-batch gradients of each term.

    Args:
        gram: float64 [M_s + M_r, M_s + M_r], micro-batches of equal size, SFT first.
        sft_count: M_s.

    Each estimate is a U-statistic. The mean C of the block C_ij = <x_i, y_j> is unbiased because
    the two terms are independent. The mean of C_ij C_kl over i != k, j != l is an unbiased estimate
    of <g_s, g_r>^2; C^2 minus this mean estimates the variance of C. |g|^2 is the mean of <x_i,
    x_j> over i != j. A term with a single micro-batch has no noise estimate, so values that need
    one are nan.
    """
    cross = gram[:sft_count, sft_count:]
    inner = cross.mean().item()
    return Alignment(
        inner=inner,
        inner_variance=inner**2 - _square_of_mean(cross),
        sft_square=_off_diagonal(gram[:sft_count, :sft_count]),
        rl_square=_off_diagonal(gram[sft_count:, sft_count:]),
        sft_total=gram[:sft_count, :sft_count].mean().item(),
        rl_total=gram[sft_count:, sft_count:].mean().item(),
    )


def _square_of_mean(cross: torch.Tensor) -> float:
    """Mean of C_ij C_kl over i != k and j != l, by inclusion-exclusion; nan if there are none."""
    rows, columns = cross.shape
    total = cross.sum() ** 2 + cross.square().sum()
    shared = cross.sum(1).square().sum() + cross.sum(0).square().sum()
    return ((total - shared) / (rows * (rows - 1) * columns * (columns - 1))).item()


def _off_diagonal(block: torch.Tensor) -> float:
    """Mean of <x_i, x_j> over i != j; nan if there are none."""
    count = len(block)
    return ((block.sum() - block.diagonal().sum()) / (count * (count - 1))).item()


class SourceNeeds(NamedTuple):
    """Evidence that a signal source needs in addition to `Evidence.moments`."""

    gram: bool = False
    """`Evidence.gram`: micro-batch gradients, which cost memory. They also give the inner product
    of the two gradients, which a gate needs."""
    bias: bool = False
    """`Evidence.bias_gram`, at the cost of two extra backward passes."""


class Reading(NamedTuple):
    """Output of a source: arguments for `gac.control.controller.step`."""

    signals: Signals
    corrections: Corrections | None = None
    alignment: Alignment | None = None


class SignalSource(Protocol):
    """Interface of a signal source; the method chooses it and the trainer provides the evidence."""

    @property
    def needs(self) -> SourceNeeds:
        """Evidence that `read` needs."""

    def init(self) -> State:
        """Return the state before the first reading."""

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """Return the signals of this refresh and the new state; `state` is not modified."""


@dataclass(frozen=True)
class ProxySignals:
    """The paper's proxies (equations 7 to 9) from the loss kernel's token statistics."""

    trim: float = 0.1
    """Fraction of the demonstrations trimmed at each end of the sorted likelihoods, in [0, 0.5)."""
    needs = SourceNeeds()

    def init(self) -> State:
        """Return an empty state: this source is stateless."""
        return {}

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """Compute the signals from `evidence.moments`."""
        if evidence.moments is None:
            raise ValueError("evidence.moments=None: call the loss with moments=True")
        return Reading(evidence.moments.signals(self.trim)), state


@dataclass(frozen=True)
class GradientSignals:
    """The quantities in equation 3 themselves, estimated without bias from gradients."""

    paired: bool = False
    """SFT and RL micro-batches with the same index share their randomness, so that their covariance
    can be estimated.
    """
    bias: bool = False
    """Also measure the biases of the applied gradients relative to SFT with all token weights 1 and
    RL without clipping. The disagreement is then that of the unbiased gradients, noise included.
    """

    @property
    def needs(self) -> SourceNeeds:
        """Require micro-batch gradients and, with `bias`, the unbiased gradients."""
        return SourceNeeds(gram=True, bias=self.bias)

    def init(self) -> State:
        """Return an empty state: this source is stateless."""
        return {}

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """Compute the signals from `evidence.gram` and, with `bias`, `evidence.bias_gram`."""
        if evidence.gram is None:
            raise ValueError("evidence.gram=None: measure the micro-batch gradients")
        reading = gradient_moments(evidence.gram, evidence.sft_count, paired=self.paired)
        if not self.bias:
            return reading, state
        if evidence.bias_gram is None:
            raise ValueError("evidence.bias_gram=None: also measure the unbiased gradients")
        gram = evidence.bias_gram
        unbiased = (gram[2, 2] - 2 * gram[2, 3] + gram[3, 3]).item()
        covariance = 0.0 if reading.corrections is None else reading.corrections.covariance
        signals = reading.signals._replace(disagreement=unbiased)
        corrections = bias_moments(gram, covariance)
        return reading._replace(signals=signals, corrections=corrections), state


SOURCES: dict[str, type] = {
    "proxy": ProxySignals,
    "gradients": GradientSignals,
}
Source = Annotated[SignalSource, Choice(lambda: SOURCES)]


def gradient_moments(gram: torch.Tensor, sft_count: int, *, paired: bool = False) -> Reading:
    """Unbiased moments of the two mean gradients from the Gram matrix of their micro-batches.

    Let xbar be the mean of M gradients x_i. Then tr Var(xbar) = sum |x_i - xbar|^2 / (M (M - 1)),
    and |xbar_s - xbar_r|^2 exceeds |g_s* - g_r*|^2 by sigma_s^2 + sigma_r^2 - 2 c on average. This
    excess is subtracted, so the disagreement may be negative. A variance needs two micro-batches
    and is otherwise nan.

    Args:
        gram: [M_s + M_r, M_s + M_r] inner products; micro-batches of equal size, SFT first.
        sft_count: M_s.
        paired: micro-batches of the same index were drawn jointly (M_s = M_r); otherwise c = 0.

    Raises:
        ValueError: the shapes do not match.
    """
    gram = torch.as_tensor(gram, dtype=torch.float64)
    square = gram.ndim == 2 and gram.shape[0] == gram.shape[1]
    require(square, "gram", tuple(gram.shape), "a square matrix [M_s + M_r, M_s + M_r]")
    inside = is_count(sft_count, 1) and sft_count < gram.shape[0]
    require(inside, "sft_count", sft_count, f"an integer in [1, {gram.shape[0] - 1}]")
    sft, rl = sft_count, gram.shape[0] - sft_count
    sft_variance = _variance_of_mean(gram[:sft, :sft])
    rl_variance = _variance_of_mean(gram[sft:, sft:])
    covariance = 0.0
    if paired:
        paired_count = f"{rl}, because pairing needs as many SFT as RL micro-batches"
        require(sft == rl, "sft_count", sft_count, paired_count)
        covariance = _variance_of_mean(gram[:sft, sft:])
    gap = gram[:sft, :sft].mean() - 2 * gram[:sft, sft:].mean() + gram[sft:, sft:].mean()
    disagreement = gap.item() - sft_variance - rl_variance + 2 * covariance
    signals = Signals(sft_variance, rl_variance, disagreement)
    corrections = Corrections(covariance=covariance) if math.isfinite(covariance) else None
    return Reading(signals, corrections, alignment(gram, sft))


def bias_moments(gram: torch.Tensor, covariance: float = 0.0) -> Corrections:
    """The bias terms of `mu_star_biased`, from a 4 x 4 Gram matrix of mean gradients.

    Args:
        gram: [4, 4] inner products of the applied SFT, applied RL, unbiased SFT and unbiased RL
            gradients (e.g. phi-weighted, clipped, plain, unclipped), all on the same tokens.
        covariance: c, passed through.
    """
    gram = torch.as_tensor(gram, dtype=torch.float64)
    require(gram.shape == (4, 4), "gram", tuple(gram.shape), "a [4, 4] matrix")
    d = gram.new_tensor([0.0, 0.0, 1.0, -1.0])
    rl_bias = gram.new_tensor([0.0, 1.0, 0.0, -1.0])
    gap = gram.new_tensor([1.0, 0.0, -1.0, 0.0]) - rl_bias
    pairs = ((gap, gap), (gap, d), (rl_bias, d), (rl_bias, gap))
    return Corrections(covariance, *((x @ gram @ y).item() for x, y in pairs))


def bias_alignment(gram: torch.Tensor, alpha: float) -> float:
    """gamma of the paper's appendix A: <b_r - b_s, g> / |g|^2 with g = alpha g_s + (1 - alpha) g_r.

    The paper does not define its g-bar; here it is the target of equation 1, from the unbiased
    gradients.

    Args:
        gram: [4, 4] as in `bias_moments`.
        alpha: target share of the SFT gradient, in [0, 1].

    Returns:
        gamma; nan if the target is 0.
    """
    gram = torch.as_tensor(gram, dtype=torch.float64)
    gap = gram.new_tensor([-1.0, 1.0, 1.0, -1.0])
    target = gram.new_tensor([0.0, 0.0, alpha, 1.0 - alpha])
    square = (target @ gram @ target).item()
    return (gap @ gram @ target).item() / square if square > 0 else math.nan


def _variance_of_mean(block: torch.Tensor) -> float:
    """Estimate tr Cov(mean x, mean y) from <x_i, y_j> [M, M] of M paired draws; nan for M < 2."""
    count = block.shape[0]
    if count < 2:
        return math.nan
    return (block.diagonal().mean() - block.mean()).item() / (count - 1)
