"""Captured steps: a function whose program runs again on new inputs, without recording it again."""
