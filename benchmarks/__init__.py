"""Measurements of the project; each file answers one question."""
