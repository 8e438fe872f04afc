"""Adaptive mixing in other trainers: one module per trainer, plus shared code."""
