"""Signal sources on real loss statistics, and gradient moments against direct computation."""

import math

import pytest
import torch

from gac.control.estimators import mu_star_biased
from gac.control.signals import (
    GradientSignals,
    ProxySignals,
    SourceNeeds,
    bias_alignment,
    bias_moments,
    gradient_moments,
)
from gac.step_end import signal_columns
from gac.types import Evidence
from gac_kernels import TokenMoments, fused_gac_loss


def moments(seed: int) -> TokenMoments:
    """Statistics of 8 rollouts and 8 demonstrations, from the loss itself."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, 5, 11, generator=generator)
    targets = torch.randint(11, (16, 5), generator=generator)
    advantages = torch.randn(16, 5, generator=generator)
    return fused_gac_loss(
        logits, targets, advantages, torch.arange(16) < 8, backend="reference", mu=0.5
    ).moments


def test_proxies_are_the_loss_statistics() -> None:
    reading, _ = ProxySignals(trim=0.2).read(Evidence(0, moments(0)), {})
    assert reading.signals == moments(0).signals(0.2) != moments(0).signals(0.0)
    assert reading.corrections is None
    assert not any(ProxySignals().needs)


@pytest.mark.parametrize(
    ("demos", "equal", "measured"),
    [(8, False, True), (8, True, False), (0, False, False), (16, False, False)],
)
def test_the_disagreement_is_a_metric_only_if_both_signals_are_there(demos, equal, measured):
    """The formula gives 1 if all advantages are equal; its value is kept for the controller."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(16, 5, 11, generator=generator), torch.ones(16, 5).long()
    advantages = torch.zeros(16) if equal else torch.randn(16, generator=generator)
    is_demo = torch.arange(16) < demos
    own = fused_gac_loss(logits, targets, advantages, is_demo, backend="reference", mu=0.5).moments
    columns, signals = signal_columns(own, 0.1), own.signals(0.1)
    assert (columns["disagreement"] is not None) == measured
    if measured:
        assert columns["disagreement"] == signals.disagreement
    if equal:
        assert signals.disagreement == 1.0
    assert columns["rl_variance"] == pytest.approx(signals.rl_variance, nan_ok=True)
    assert columns["sft_variance"] == pytest.approx(signals.sft_variance, nan_ok=True)


def test_gradient_moments_equal_direct_computation() -> None:
    x = torch.randn(5, 9, dtype=torch.float64) + 1
    y = torch.randn(3, 9, dtype=torch.float64) * 2
    gradients = torch.cat([x, y])
    reading = gradient_moments(gradients @ gradients.T, 5)
    sft = x.var(dim=0).sum().item() / 5
    rl = y.var(dim=0).sum().item() / 3
    gap = (x.mean(0) - y.mean(0)).square().sum().item() - sft - rl
    assert reading.signals == pytest.approx((sft, rl, gap), rel=1e-12)
    assert reading.corrections.covariance == 0.0


def test_paired_covariance_equals_direct_computation() -> None:
    x, noise = torch.randn(2, 6, 4, dtype=torch.float64)
    y = 0.5 * x + noise
    gradients = torch.cat([x, y])
    reading = gradient_moments(gradients @ gradients.T, 6, paired=True)
    covariance = sum(torch.cov(torch.stack([x[:, k], y[:, k]]))[0, 1].item() for k in range(4)) / 6
    assert reading.corrections.covariance == pytest.approx(covariance, rel=1e-12)
    sft, rl, gap = reading.signals
    assert gap == pytest.approx(
        (x.mean(0) - y.mean(0)).square().sum().item() - sft - rl + 2 * covariance, rel=1e-12
    )


def test_one_micro_batch_has_no_variance() -> None:
    gradients = torch.randn(3, 4, dtype=torch.float64)
    sft, rl, gap = gradient_moments(gradients @ gradients.T, 1).signals
    assert math.isnan(sft)
    assert math.isfinite(rl)
    assert math.isnan(gap)


def test_gradient_source_reads_the_gram_matrix() -> None:
    gradients = torch.randn(6, 4, dtype=torch.float64)
    reading, _ = GradientSignals(paired=True).read(
        Evidence(0, gram=gradients @ gradients.T, sft_count=3), {}
    )
    assert reading == gradient_moments(gradients @ gradients.T, 3, paired=True)
    assert GradientSignals().needs == SourceNeeds(gram=True)
    assert GradientSignals(bias=True).needs == SourceNeeds(gram=True, bias=True)


def test_moments_are_computed_in_float64() -> None:
    gradients = torch.randn(4, 9)
    gram = gradients @ gradients.T
    assert gradient_moments(gram, 2) == gradient_moments(gram.double(), 2)
    assert bias_moments(gram) == bias_moments(gram.double())


def test_biased_source_reads_the_disagreement_of_the_plain_gradients() -> None:
    used_s, used_r, plain_s, plain_r = vectors = torch.randn(4, 8, dtype=torch.float64)
    gradients = torch.randn(4, 8, dtype=torch.float64)
    bias_gram = vectors @ vectors.T
    evidence = Evidence(0, gram=gradients @ gradients.T, sft_count=2, bias_gram=bias_gram)
    reading, _ = GradientSignals(bias=True).read(evidence, {})
    assert reading.alignment == gradient_moments(evidence.gram, 2).alignment
    gap = plain_s - plain_r
    assert reading.signals.disagreement == pytest.approx(gap.dot(gap).item())
    assert reading.corrections == bias_moments(bias_gram)
    assert abs(gap.norm() - (used_s - used_r).norm()) > 0.1  # the two pairs differ
    paired, _ = GradientSignals(bias=True, paired=True).read(evidence, {})
    covariance = gradient_moments(evidence.gram, 2, paired=True).corrections.covariance
    assert covariance != 0
    assert paired.corrections == bias_moments(bias_gram, covariance)
    single = evidence._replace(gram=evidence.gram[:2, :2], sft_count=1)  # unknown covariance
    reading, _ = GradientSignals(bias=True, paired=True).read(single, {})
    assert reading.corrections == bias_moments(bias_gram)


def test_bias_moments_give_the_exact_optimum() -> None:
    vectors = torch.randn(4, 8, dtype=torch.float64)
    used_s, used_r, true_s, true_r = vectors
    biases = bias_moments(vectors @ vectors.T, covariance=0.1)
    d, gap, rl = true_s - true_r, (used_s - true_s) - (used_r - true_r), used_r - true_r
    pairs = ((gap, gap), (gap, d), (rl, d), (rl, gap))
    assert biases == pytest.approx((0.1, *(x.dot(y).item() for x, y in pairs)), rel=1e-10)
    # without noise, the optimum projects the target onto the line through the used gradients
    target, line = 0.4 * true_s + 0.6 * true_r, used_s - used_r
    mu = ((target - used_r).dot(line) / line.dot(line)).clamp(0, 1).item()
    noiseless = biases._replace(covariance=0.0)
    assert mu_star_biased(0.4, d.dot(d).item(), 0, 0, noiseless) == pytest.approx(mu, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ProxySignals().read(Evidence(0), {}), "evidence.moments=None"),
        (lambda: GradientSignals().read(Evidence(0), {}), "evidence.gram=None"),
        (
            lambda: GradientSignals(bias=True).read(
                Evidence(0, gram=torch.eye(2), sft_count=1), {}
            ),
            "evidence.bias_gram=None",
        ),
        (lambda: gradient_moments(torch.ones(3), 1), "gram=(3,): use a square matrix"),
        (lambda: gradient_moments(torch.eye(3), 3), "sft_count=3: use an integer in [1, 2]"),
        (lambda: gradient_moments(torch.eye(3), 0), "sft_count=0: use an integer in [1, 2]"),
        (lambda: gradient_moments(torch.ones(3, 2), 1), "gram=(3, 2): use a square matrix"),
        (lambda: gradient_moments(torch.eye(3), 1, paired=True), "sft_count=1: use 2"),
        (lambda: bias_moments(torch.eye(3)), "gram=(3, 3): use a [4, 4] matrix"),
    ],
)
def test_errors_name_argument_and_value(call, message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_gamma_is_the_alignment_of_the_bias_difference_with_the_target() -> None:
    """Against vectors: <b_r - b_s, g> / |g|^2 with g = alpha g_s + (1 - alpha) g_r."""
    generator = torch.Generator().manual_seed(0)
    applied_s, applied_r, s, r = torch.randn(4, 7, dtype=torch.float64, generator=generator)
    vectors = torch.stack([applied_s, applied_r, s, r])
    target = 0.3 * s + 0.7 * r
    gap = (applied_r - r) - (applied_s - s)
    expected = (gap @ target / (target @ target)).item()
    assert bias_alignment(vectors @ vectors.T, 0.3) == pytest.approx(expected)
    assert math.isnan(bias_alignment(torch.zeros(4, 4), 0.3))
