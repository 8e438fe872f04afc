"""Fault tolerance: checkpoints, heartbeats, requests to stop.

This package may import `evaluation` and earlier packages.
"""
