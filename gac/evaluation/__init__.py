"""Evaluation: one task, a suite of them, and estimates with intervals.

This package may import `methods` and earlier packages.
"""
