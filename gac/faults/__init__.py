"""Fault tolerance: checkpoints, guards, heartbeats, replay of skipped steps."""
