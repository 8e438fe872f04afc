"""Adaptive mixing inside other trainers: one file per trainer, and what they share."""
