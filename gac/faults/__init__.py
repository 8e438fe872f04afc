"""Fault tolerance: checkpoints, guards, heartbeats, preflight checks.

It may import `evaluation` and earlier packages.
"""
