"""Sampling: generation engines, rollout plans, advantages.

This package may import `rewards` and earlier packages.
"""

from .function import Rollout

__all__ = ["Rollout"]
