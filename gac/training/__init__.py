"""The run configuration, the training loop and its optimizer step, export and replay.

It may import `faults` and earlier packages.
"""
