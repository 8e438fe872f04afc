"""Sampling: generation engines, rollout plans, advantages.

It may import `rewards` and earlier packages.
"""
