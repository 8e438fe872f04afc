"""Evaluation: one task, a suite of them, and estimates with intervals.

It may import `methods` and earlier packages.
"""
