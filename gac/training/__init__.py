"""The run configuration, the training loop and its optimizer step, export and replay.

This package may import `faults` and earlier packages.
"""
