"""Optimizers and learning-rate schedules, and where their state lives."""
