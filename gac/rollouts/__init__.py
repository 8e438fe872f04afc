"""Sampling: generation engines, rollouts, advantages."""
