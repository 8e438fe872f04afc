"""Fault tolerance: checkpoints, guards, heartbeats, preflight checks.

This package may import `evaluation` and earlier packages.
"""
