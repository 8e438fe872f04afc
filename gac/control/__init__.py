"""Chooses mu: controller, gate, alarm, estimators, schedules and signals.

This package may import `config`.
"""
