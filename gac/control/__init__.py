"""How mu is chosen: controller, gate, estimators, schedules, signals and solvers.

It may import `config`.
"""
