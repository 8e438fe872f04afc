"""Sampling: generation engines, rollout plans, advantages.

This package may import `rewards` and earlier packages.
"""

from .plan import Rollout

__all__ = ["Rollout"]
