"""The device's functions."""
