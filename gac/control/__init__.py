"""Chooses mu: controller, gate, alarm, estimators, schedules and signals."""
