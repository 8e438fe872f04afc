"""Fault tolerance: checkpoints, guards, heartbeats, checks before the start.

It may import `evaluation` and earlier packages.
"""
