"""How mu is chosen: controller, estimators, schedules, signals, solvers."""
