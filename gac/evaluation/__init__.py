"""Evaluation: one task, a suite of them, and estimates with intervals."""
