"""Variants of GAC: the algorithm as printed, ablations, degradations, gates and the oracle."""

from __future__ import annotations

from gac.control.alarm import Alarm
from gac.control.gate import Gate
from gac.control.schedules import Prior, RandomPrior
from gac.control.signals import (
    ConstantVariance,
    GradientSignals,
    ProxySignals,
    RandomDisagreement,
    ShuffledDisagreement,
    SketchSignals,
)
from gac_kernels import DemoWeight

from .gac import GAC
from .preset import preset

ABLATION = "the paper, table 22"
DEGRADATION = "the paper, table 8"
PRIORS = "the paper, table 15"
GRADIENT_COST = "reference forward pass and one gradient buffer per micro-batch, on refresh steps"

GAC_VARIANTS = (
    preset(
        GAC,
        "gac-paper",
        "GAC exactly as printed in Algorithm 1; mu hardly leaves the prior.",
        ema="literal",
        alpha_every="step",
        signal_decay=0.99,
        cost="reference forward pass on the rollouts",
    ),
    preset(
        GAC,
        "gac-no-phi",
        "GAC with plain cross-entropy on the demonstrations.",
        source="the paper, table 3",
        weight=DemoWeight.ONE,
    ),
    preset(GAC, "gac-no-ema", "GAC without smoothing of mu*.", source=ABLATION, ema="none"),
    preset(
        GAC,
        "gac-no-prior",
        "GAC without the schedule prior (lambda = 1).",
        source=ABLATION,
        prior_blend=1.0,
    ),
    preset(
        GAC,
        "gac-no-cap",
        "GAC without a cap on the change of mu per step.",
        source=ABLATION,
        max_step=1.0,
    ),
    preset(
        GAC,
        "gac-no-trim",
        "GAC without trimming of extreme demonstrations in sigma_s^2.",
        source=ABLATION,
        signals=ProxySignals(trim=0.0),
    ),
    preset(
        GAC,
        "gac-covariance",
        "GAC with the measured covariance of the two noises (equation 4).",
        source=ABLATION,
        cost=GRADIENT_COST,
        estimator="correlated",
        signals=GradientSignals(paired=True),
    ),
    preset(
        GAC,
        "gac-biased",
        "GAC with the exact optimum for biased gradients; biases are measured relative to plain "
        "SFT and the unclipped policy gradient.",
        source="docs/controller.md, for equation 5",
        cost=f"{GRADIENT_COST}; two more backward passes",
        estimator="biased",
        signals=GradientSignals(bias=True),
    ),
    preset(
        GAC,
        "gac-biased-paper",
        "GAC with equation 5 as printed, from the same measurements.",
        source="the paper, equation 5",
        cost=f"{GRADIENT_COST}; two more backward passes",
        estimator="biased_paper",
        signals=GradientSignals(bias=True),
    ),
    preset(
        GAC,
        "gac-early-refresh",
        "GAC that refreshes its signals every 2 steps during the first 100 steps.",
        source="the paper, appendix E",
        early_update_every=2,
    ),
    preset(
        GAC,
        "gac-constant-variance",
        "GAC with sigma_r^2 fixed at 1.",
        source=DEGRADATION,
        signals=ConstantVariance(),
    ),
    preset(
        GAC,
        "gac-shuffled-disagreement",
        "GAC with the disagreement drawn at random from its recent values.",
        source=DEGRADATION,
        signals=ShuffledDisagreement(),
    ),
    preset(
        GAC,
        "gac-random-disagreement",
        "GAC with the disagreement replaced by uniform noise.",
        source=DEGRADATION,
        signals=RandomDisagreement(),
    ),
    preset(
        GAC,
        "gac-prior-low",
        "GAC with a constant prior of 0.1.",
        source=PRIORS,
        prior=Prior.constant(0.1),
    ),
    preset(
        GAC,
        "gac-prior-high",
        "GAC with a constant prior of 0.9.",
        source=PRIORS,
        prior=Prior.constant(0.9),
    ),
    preset(
        GAC,
        "gac-prior-random",
        "GAC with a random prior, drawn in every step.",
        source=PRIORS,
        prior=RandomPrior(),
    ),
    preset(
        GAC,
        "gac-gated",
        "A constant mu of 0.7, scaled by a trust in [0, 1] that follows the inner product of the "
        "two gradients.",
        source="docs/controller.md",
        cost=GRADIENT_COST,
        gate=Gate(),
        alarm=Alarm(),
        prior=Prior.constant(0.7),
        prior_blend=0.0,
        mu_min=0.0,
        update_every=2,
        max_step=0.15,
        signals=GradientSignals(),
        weight=DemoWeight.ONE,
    ),
    preset(
        GAC,
        "gac-gated-sketch",
        "gac-gated with the inner product of the LM head gradients only, sketched in the loss.",
        source="docs/controller.md",
        cost="reference forward pass on the rollouts, on refresh steps",
        gate=Gate("cosine"),
        prior=Prior.constant(0.7),
        prior_blend=0.0,
        mu_min=0.0,
        update_every=2,
        max_step=0.15,
        signals=SketchSignals(),
        weight=DemoWeight.ONE,
    ),
    preset(
        GAC,
        "oracle",
        "mu* from unbiased gradient moments, without averaging, prior or cap.",
        source="the paper, section 4.3 (which does not define its oracle)",
        cost=GRADIENT_COST,
        ema="none",
        prior_blend=1.0,
        max_step=1.0,
        signal_decay=0.0,
        signals=GradientSignals(),
    ),
)
