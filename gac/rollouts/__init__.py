"""Sampling: generation, what is made of it, advantages."""
