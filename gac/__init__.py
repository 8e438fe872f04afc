"""Hybrid SFT + RL post-training with an adaptive mixing weight."""

from .controller import ControllerConfig, GuidedController
from .estimators import mu_star, mu_star_biased

__all__ = ["ControllerConfig", "GuidedController", "mu_star", "mu_star_biased"]
