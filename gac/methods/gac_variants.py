"""GAC as printed, its ablations, spoilt signals, poor priors, and the oracle: all are values."""

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
SPOILT = "the paper, table 8"
PRIORS = "the paper, table 15"
COSTLY = "reference forward, one gradient buffer per micro-batch, on refresh steps"

GAC_VARIANTS = (
    preset(GAC, "gac-paper", "GAC exactly as Algorithm 1 is printed; it hardly leaves its prior.",
           ema="literal", alpha_every="step", signal_decay=0.99,
           cost="reference forward of the rollouts"),
    preset(GAC, "gac-no-phi", "GAC with plain cross-entropy on the demonstrations.",
           source="the paper, table 3", weight=DemoWeight.ONE),
    preset(GAC, "gac-no-ema", "GAC whose mu* is not smoothed.", source=ABLATION, ema="none"),
    preset(GAC, "gac-no-prior", "GAC without the schedule prior (lambda = 1).",
           source=ABLATION, prior_blend=1.0),
    preset(GAC, "gac-no-cap", "GAC without a cap on the change of mu per step.",
           source=ABLATION, max_step=1.0),
    preset(GAC, "gac-no-trim", "GAC whose sigma_s^2 keeps the extreme demonstrations.",
           source=ABLATION, signals=ProxySignals(trim=0.0)),
    preset(GAC, "gac-covariance", "GAC with the covariance of both noises (equation 4), measured.",
           source=ABLATION, cost=COSTLY, estimator="correlated",
           signals=GradientSignals(paired=True)),
    preset(GAC, "gac-biased", "GAC with the exact optimum under biases, measured against plain SFT "
           "and an unclipped policy gradient.", source="docs/controller.md, for equation 5",
           cost=f"{COSTLY}; two more backward passes", estimator="biased",
           signals=GradientSignals(bias=True)),
    preset(GAC, "gac-biased-paper", "GAC with equation 5 as printed, from the same measurements.",
           source="the paper, equation 5", cost=f"{COSTLY}; two more backward passes",
           estimator="biased_paper", signals=GradientSignals(bias=True)),
    preset(GAC, "gac-early-refresh", "GAC that refreshes its signals every 2 steps at first.",
           source="the paper, appendix E", early_update_every=2),
    preset(GAC, "gac-constant-variance", "GAC told that sigma_r^2 is always 1.",
           source=SPOILT, signals=ConstantVariance()),
    preset(GAC, "gac-shuffled-disagreement", "GAC whose disagreement is drawn from its own past.",
           source=SPOILT, signals=ShuffledDisagreement()),
    preset(GAC, "gac-random-disagreement", "GAC whose disagreement is uniform noise.",
           source=SPOILT, signals=RandomDisagreement()),
    preset(GAC, "gac-prior-low", "GAC with a constant prior of 0.1.",
           source=PRIORS, prior=Prior.constant(0.1)),
    preset(GAC, "gac-prior-high", "GAC with a constant prior of 0.9.",
           source=PRIORS, prior=Prior.constant(0.9)),
    preset(GAC, "gac-prior-random", "GAC with a prior drawn anew in every step.",
           source=PRIORS, prior=RandomPrior()),
    preset(GAC, "gac-gated", "A constant 0.7 times the trust that rewards put in the "
           "demonstrations, from the inner product of both gradients.",
           source="docs/controller.md",
           cost=COSTLY, gate=Gate(), alarm=Alarm(), prior=Prior.constant(0.7), prior_blend=0.0,
           mu_min=0.0, update_every=2, max_step=0.15, signals=GradientSignals(),
           weight=DemoWeight.ONE),
    preset(GAC, "gac-gated-sketch", "gac-gated whose inner product is that of the head's gradient, "
           "from its sketch in the loss.", source="docs/controller.md",
           cost="reference forward of the rollouts, on refresh steps",
           gate=Gate("cosine"), prior=Prior.constant(0.7), prior_blend=0.0, mu_min=0.0,
           update_every=2, max_step=0.15, signals=SketchSignals(), weight=DemoWeight.ONE),
    preset(GAC, "oracle", "mu* itself, from unbiased gradient moments: no average, prior or cap.",
           source="the paper, section 4.3 (its oracle is undefined)", cost=COSTLY, ema="none",
           prior_blend=1.0, max_step=1.0, signal_decay=0.0, signals=GradientSignals()),
)  # fmt: skip
