"""Probes: what some steps measure besides the gradient of the mixed loss. One probe per file."""
