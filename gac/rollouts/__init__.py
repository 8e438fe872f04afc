"""Sampling: generation engines, rollout plans, advantages."""

from gac.types import Rollout

__all__ = ["Rollout"]
