"""Fault tolerance: checkpoints, heartbeats, requests to stop."""
