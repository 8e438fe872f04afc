"""Chooses mu: controller, gate, alarm, estimators, schedules, signals and solvers.

This package may import `config`.
"""
